package com.github.shyiko.mysql.binlog.event.deserialization;

import com.github.shyiko.mysql.binlog.event.EventHeaderV4;
import com.github.shyiko.mysql.binlog.event.EventType;
import com.github.shyiko.mysql.binlog.io.ByteArrayInputStream;
import java.io.IOException;
import millrace.CaptureEngine;

/**
 * Reads the header of an event, and ends the engine for a compressed one.
 *
 * <p>Takes the place of the client's class of this name, which leaves events out whose types it does not know.
 */
public class EventHeaderV4Deserializer implements EventHeaderDeserializer<EventHeaderV4> {
    private static final int FIRST_COMPRESSED = 165;  // MariaDB's QUERY_COMPRESSED_EVENT
    private static final int LAST_COMPRESSED = 171;  // DELETE_ROWS_COMPRESSED_EVENT
    private static final ThreadLocal<EventType> LAST = new ThreadLocal<>();

    /** The type of the event that this thread reads. */
    static EventType last() {
        return LAST.get();
    }

    @Override
    public EventHeaderV4 deserialize(ByteArrayInputStream stream) throws IOException {
        EventHeaderV4 found = new EventHeaderV4();
        found.setTimestamp(stream.readLong(4) * 1000L);
        int number = stream.readInteger(1);
        if (number >= FIRST_COMPRESSED && number <= LAST_COMPRESSED) {
            CaptureEngine.stopAtCompressed();
        }
        EventType type = EventType.byEventNumber(number);
        found.setEventType(type == null ? EventType.UNKNOWN : type);
        LAST.set(found.getEventType());
        found.setServerId(stream.readLong(4));
        found.setEventLength(stream.readLong(4));
        found.setNextPosition(stream.readLong(4));
        found.setFlags(stream.readInteger(2));
        return found;
    }
}
