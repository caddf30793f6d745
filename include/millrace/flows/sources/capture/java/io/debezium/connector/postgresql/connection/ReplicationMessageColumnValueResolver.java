package io.debezium.connector.postgresql.connection;

import io.debezium.connector.postgresql.PostgresStreamingChangeEventSource.PgConnectionSupplier;
import io.debezium.connector.postgresql.PostgresType;
import io.debezium.connector.postgresql.TypeRegistry;
import io.debezium.connector.postgresql.connection.ReplicationMessage.ColumnValue;

/**
 * Gives each value of the replication stream as the text that the server sent, which millrace.PostgresValues converts.
 *
 * <p>Takes the place of Debezium's class of this name, since our jar is first on the class path. That one parses the text into objects which
 * cannot hold every value: arrays of several dimensions, money, times at 24:00, zones, types that it does not know.
 */
public final class ReplicationMessageColumnValueResolver {
    private ReplicationMessageColumnValueResolver() {}

    public static Object resolveValue(
        String name,
        PostgresType type,
        String fullType,
        ColumnValue<?> value,
        PgConnectionSupplier connection,
        boolean unknown,
        TypeRegistry types
    ) {
        return value.isNull() ? null : value.asString();
    }
}
