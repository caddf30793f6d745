package io.debezium.connector.mariadb;

import io.debezium.DebeziumException;
import io.debezium.connector.binlog.BinlogReadOnlyIncrementalSnapshotChangeEventSource;
import io.debezium.connector.binlog.gtid.GtidSet;
import io.debezium.connector.mariadb.gtid.MariaDbGtidSet;
import io.debezium.jdbc.JdbcConnection;
import io.debezium.pipeline.EventDispatcher;
import io.debezium.pipeline.notification.NotificationService;
import io.debezium.pipeline.signal.SignalPayload;
import io.debezium.pipeline.signal.actions.snapshotting.SnapshotConfiguration;
import io.debezium.pipeline.source.spi.DataChangeEventListener;
import io.debezium.pipeline.source.spi.SnapshotProgressListener;
import io.debezium.pipeline.spi.OffsetContext;
import io.debezium.relational.TableId;
import io.debezium.schema.DatabaseSchema;
import io.debezium.spi.schema.DataCollectionId;
import io.debezium.util.Clock;
import java.sql.SQLException;
import java.util.function.Consumer;
import millrace.CaptureEngine;

/**
 * Reads the rows of tables beside their changes, one thread at a time.
 *
 * <p>Takes the place of Debezium's class of this name. There, the thread of signals and the one of the binary log share a
 * table's place without a lock: both may end a table, and so pass over the next one. A signal that fails is only logged,
 * and its tables wait for ever; here it ends the engine, which continues with them.
 */
public class MariaDbReadOnlyIncrementalSnapshotChangeEventSource
    extends BinlogReadOnlyIncrementalSnapshotChangeEventSource<MariaDbPartition, MariaDbOffsetContext> {
    private static final String EXECUTED = "SHOW GLOBAL VARIABLES LIKE 'GTID_BINLOG_POS'";

    public MariaDbReadOnlyIncrementalSnapshotChangeEventSource(
        MariaDbConnectorConfig config,
        JdbcConnection connection,
        EventDispatcher<MariaDbPartition, TableId> dispatcher,
        DatabaseSchema<?> schema,
        Clock clock,
        SnapshotProgressListener<MariaDbPartition> progress,
        DataChangeEventListener<MariaDbPartition> changes,
        NotificationService<MariaDbPartition, MariaDbOffsetContext> notifications
    ) {
        super(config, connection, dispatcher, schema, clock, progress, changes, notifications);
    }

    @Override
    public synchronized void addDataCollectionNamesToSnapshot(
        SignalPayload<MariaDbPartition> signal, SnapshotConfiguration configuration
    ) throws InterruptedException {
        try {
            super.addDataCollectionNamesToSnapshot(signal, configuration);
        } catch (RuntimeException error) {
            CaptureEngine.end("rows could not be read beside the changes", error);
        }
    }

    @Override
    public synchronized void init(MariaDbPartition partition, OffsetContext offset) {
        super.init(partition, offset);
    }

    @Override
    public synchronized void processMessage(
        MariaDbPartition partition, DataCollectionId table, Object key, OffsetContext offset
    ) throws InterruptedException {
        super.processMessage(partition, table, key, offset);
    }

    @Override
    public synchronized void processHeartbeat(MariaDbPartition partition, OffsetContext offset) throws InterruptedException {
        super.processHeartbeat(partition, offset);
    }

    @Override
    public synchronized void processFilteredEvent(MariaDbPartition partition, OffsetContext offset)
        throws InterruptedException {
        super.processFilteredEvent(partition, offset);
    }

    @Override
    public synchronized void processTransactionStartedEvent(MariaDbPartition partition, OffsetContext offset)
        throws InterruptedException {
        super.processTransactionStartedEvent(partition, offset);
    }

    @Override
    public synchronized void processTransactionCommittedEvent(MariaDbPartition partition, OffsetContext offset)
        throws InterruptedException {
        super.processTransactionCommittedEvent(partition, offset);
    }

    @Override
    public synchronized void processSchemaChange(MariaDbPartition partition, OffsetContext offset, DataCollectionId table)
        throws InterruptedException {
        super.processSchemaChange(partition, offset, table);
    }

    @Override
    protected void getExecutedGtidSet(Consumer<GtidSet> watermark) {
        try {
            jdbcConnection.query(EXECUTED, found -> {
                if (found.next()) {
                    watermark.accept(new MariaDbGtidSet(found.getString(2)));
                }
            });
            jdbcConnection.commit();
        } catch (SQLException error) {
            throw new DebeziumException(error);
        }
    }
}
