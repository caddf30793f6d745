package com.github.shyiko.mysql.binlog.event.deserialization;

import com.github.shyiko.mysql.binlog.event.QueryEventData;
import com.github.shyiko.mysql.binlog.io.ByteArrayInputStream;
import java.io.IOException;
import millrace.CaptureEngine;

/**
 * Reads a statement of the log, and ends the engine for one that changes rows of a captured table.
 *
 * <p>Takes the place of the client's class of this name. Debezium leaves such statements out, some without a word.
 */
public class QueryEventDataDeserializer implements EventDataDeserializer<QueryEventData> {
    @Override
    public QueryEventData deserialize(ByteArrayInputStream stream) throws IOException {
        QueryEventData found = new QueryEventData();
        found.setThreadId(stream.readLong(4));
        found.setExecutionTime(stream.readLong(4));
        stream.skip(1);
        found.setErrorCode(stream.readInteger(2));
        stream.skip(stream.readInteger(2));
        found.setDatabase(stream.readZeroTerminatedString());
        found.setSql(stream.readString(stream.available()));
        CaptureEngine.requireNoRows(found.getDatabase(), found.getSql());
        return found;
    }
}
