package com.github.shyiko.mysql.binlog.event.deserialization;

import com.github.shyiko.mysql.binlog.event.EventData;
import com.github.shyiko.mysql.binlog.event.EventType;
import com.github.shyiko.mysql.binlog.io.ByteArrayInputStream;
import java.io.IOException;
import millrace.CaptureEngine;

/**
 * Leaves out an event that Debezium does not handle, and ends the engine for a LOAD DATA into a captured table.
 *
 * <p>Takes the place of the client's class of this name.
 */
public class NullEventDataDeserializer implements EventDataDeserializer<EventData> {
    private static final int FILE = 13;  // the number of the file, two places in the statement, and what duplicates do

    @Override
    public EventData deserialize(ByteArrayInputStream stream) throws IOException {
        if (EventHeaderV4Deserializer.last() == EventType.EXECUTE_LOAD_QUERY) {
            stream.skip(4 + 4 + 1 + 2);
            int variables = stream.readInteger(2);
            stream.skip(FILE + variables);
            String database = stream.readZeroTerminatedString();
            CaptureEngine.requireNoRows(database, stream.readString(stream.available()));
        }
        return null;
    }
}
