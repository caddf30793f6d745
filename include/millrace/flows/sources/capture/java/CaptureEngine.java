package millrace;

import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonGenerator;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import io.debezium.DebeziumException;
import io.debezium.config.Configuration;
import io.debezium.document.DocumentReader;
import io.debezium.document.DocumentWriter;
import io.debezium.embedded.Connect;
import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.relational.history.AbstractSchemaHistory;
import io.debezium.relational.history.HistoryRecord;
import io.debezium.relational.history.HistoryRecordComparator;
import io.debezium.relational.history.SchemaHistoryException;
import io.debezium.relational.history.SchemaHistoryListener;
import java.io.BufferedInputStream;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.EOFException;
import java.io.FileOutputStream;
import java.io.FileDescriptor;
import java.io.IOException;
import java.io.OutputStream;
import java.io.PrintStream;
import java.math.BigDecimal;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.LocalDateTime;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.IdentityHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.kafka.connect.data.Field;
import org.apache.kafka.connect.data.Schema;
import org.apache.kafka.connect.data.Struct;
import org.apache.kafka.connect.json.JsonConverter;
import org.apache.kafka.connect.runtime.WorkerConfig;
import org.apache.kafka.connect.source.SourceRecord;
import org.apache.kafka.connect.storage.MemoryOffsetBackingStore;

/**
 * Debezium's embedded engine as a child process: change events go out in frames on stdout, acknowledgements come in on stdin.
 *
 * <p>A frame is a type (one byte), a length (four bytes, big-endian) and that many bytes. In: P the start, JSON with "properties", "tables" without
 * their database and, to continue, "partition", "offset" and "history"; A one batch is durable; G a signal, JSON with "id", "type" and "data". The end of stdin stops the engine. Out: H a record of the schema
 * history; S the columns of a table, before its first event and after each change of it; B a batch, a line of JSON for each event, of which
 * the last line has the offset to continue from, as has the last END of a transaction or notification; E why the engine ends. The engine
 * sends the next batch, and confirms a position to the database, only after A. What the reader has of H, S and B is in the order in which it is needed.
 *
 * <p>millrace.flows.sources.capture.engine is the other side. tools/capture_jar.sh compiles this file.
 */
public final class CaptureEngine {
    private static final Object WRITING = new Object();
    private static final BlockingQueue<Boolean> ACKNOWLEDGED = new ArrayBlockingQueue<>(16);
    private static final String ROWS_BEGIN = "^(\\s|/\\*.*?\\*/|--[^\n]*\n|#[^\n]*\n)*(set\\s+statement\\s.*?\\sfor\\s+)?";
    private static final Pattern ROWS = Pattern.compile(
        ROWS_BEGIN + "(insert|update|delete|replace|with|load|call)\\b",
        Pattern.CASE_INSENSITIVE | Pattern.DOTALL);
    private static final Pattern INTO = Pattern.compile(
        ROWS_BEGIN + "(?:insert|replace|load\\s+(?:data|xml)\\b.*?\\binto\\s+table)\\s+(?:(?:low_priority|delayed|high_priority|ignore|into)\\s+)*"
            + "(?:(`[^`]+`|[\\w$]+)\\s*\\.\\s*)?(`[^`]+`|[\\w$]+)",
        Pattern.CASE_INSENSITIVE | Pattern.DOTALL | Pattern.UNICODE_CHARACTER_CLASS);
    private static final long FRAME_BYTES = 4 << 20;  // of lines, apart from the last one
    private static final int MAX_DIGITS = 38;  // of a collection's decimals: longer ones are texts
    private static final JsonFactory JSON = new JsonFactory();
    private static final ObjectMapper MAPPER = new ObjectMapper();
    private static DataOutputStream out;
    private static JsonNode begun;

    private CaptureEngine() {}

    public static void main(String[] arguments) throws Exception {
        out = new DataOutputStream(new FileOutputStream(FileDescriptor.out));
        System.setOut(new PrintStream(new FileOutputStream(FileDescriptor.err), true));  // what libraries print is no frame
        System.setErr(new PrintStream(new FileOutputStream(FileDescriptor.err), true));
        DataInputStream in = new DataInputStream(new BufferedInputStream(System.in));
        if (in.readUnsignedByte() != 'P') {
            throw new IOException("the first frame is none of type P");
        }
        begun = MAPPER.readTree(body(in));
        Properties properties = new Properties();
        begun.get("properties").properties().forEach(each -> properties.setProperty(each.getKey(), each.getValue().asText()));
        properties.setProperty("offset.storage", Offsets.class.getName());
        properties.setProperty("schema.history.internal", History.class.getName());
        properties.setProperty("schema.history.internal.skip.unparseable.ddl", "true");  // but see ParsingErrorListener
        Batches batches = new Batches();
        DebeziumEngine<ChangeEvent<SourceRecord, SourceRecord>> engine = DebeziumEngine.create(Connect.class)
            .using(properties)
            .notifying(batches)
            .using((success, message, error) -> ended(success, message, error))
            .build();
        ExecutorService thread = Executors.newSingleThreadExecutor();
        thread.execute(engine);
        try {
            while (true) {
                int type = in.readUnsignedByte();
                byte[] body = body(in);
                if (type == 'A') {
                    ACKNOWLEDGED.put(true);
                } else if (type == 'G') {
                    JsonNode signal = MAPPER.readTree(body);
                    engine.getSignaler().signal(new DebeziumEngine.Signal(
                        signal.get("id").asText(), signal.get("type").asText(), signal.get("data").toString(), Map.of()));
                } else {
                    throw new IOException("a frame of type " + (char) type);
                }
            }
        } catch (EOFException end) {
            // Nobody acknowledges any more: a batch that waits for that is not durable, and comes again.
            thread.shutdown();
            Thread closing = new Thread(() -> {
                try {
                    engine.close();
                } catch (Exception | Error failure) {
                    failure.printStackTrace();
                }
            });
            closing.setDaemon(true);
            closing.start();
            closing.join(TimeUnit.SECONDS.toMillis(10));
            Runtime.getRuntime().halt(0);
        }
    }

    /** Whether a statement may be about a captured table. */
    public static boolean isCaptured(String statement) {
        for (JsonNode each : begun.get("tables")) {
            if (statement.toLowerCase(Locale.ROOT).contains(each.asText().toLowerCase(Locale.ROOT))) {
                return true;
            }
        }
        return false;
    }

    /** A date and time in ISO 8601 with microseconds. */
    static String text(LocalDateTime at) {
        return String.format("%sT%02d:%02d:%02d.%06d", at.toLocalDate(), at.getHour(), at.getMinute(), at.getSecond(), at.getNano() / 1_000);
    }

    private static byte[] body(DataInputStream in) throws IOException {
        byte[] body = new byte[in.readInt()];
        in.readFully(body);
        return body;
    }

    private static void send(char type, byte[] body) throws IOException {
        synchronized (WRITING) {
            out.writeByte(type);
            out.writeInt(body.length);
            out.write(body);
            out.flush();
        }
    }

    /** The body of a frame, sent without another copy of it. */
    private static final class Frame extends ByteArrayOutputStream {
        Frame() {
            super(1 << 16);
        }

        void send(char type) throws IOException {
            synchronized (WRITING) {
                out.writeByte(type);
                out.writeInt(count);
                out.write(buf, 0, count);
                out.flush();
            }
        }
    }

    private static void ended(boolean success, String message, Throwable error) {
        try {
            List<String> causes = new ArrayList<>();
            for (Throwable each = error; each != null && causes.size() < 8; each = each.getCause()) {
                causes.add(each.getClass().getName() + ": " + each.getMessage());
            }
            send('E', MAPPER.writeValueAsBytes(Map.of("success", success, "message", String.valueOf(message), "causes", causes)));
        } catch (IOException gone) {
            // The reader has ended, and hears nothing.
        }
        if (error != null) {
            error.printStackTrace();
        }
        Runtime.getRuntime().halt(success ? 0 : 1);
    }

    /** End the engine for an error that Debezium would only log. */
    public static void end(String message, Throwable error) {
        ended(false, message, error);
    }

    /** End the engine for a statement of the log that changes rows of a captured table: the log does not have the rows. */
    public static void requireNoRows(String database, String statement) {
        if (ROWS.matcher(statement).find() && changes(database, statement)) {
            ended(false, statementBased(statement), null);
        }
    }

    /** End the engine for a part of the log that it cannot read. */
    public static void stopAtCompressed() {
        ended(false, "the server writes a compressed binary log, which the engine cannot read: run SET GLOBAL log_bin_compress = 0, and take a new snapshot", null);
    }

    /** Whether a statement may change a captured table, or one that changes it by a trigger or as a view. */
    private static boolean changes(String database, String statement) {
        List<String> names = new ArrayList<>();
        begun.get("tables").forEach(each -> names.add(each.asText().toLowerCase(Locale.ROOT)));
        JsonNode watched = begun.get("properties").get("millrace.watched");
        if (watched != null && !watched.asText().isEmpty()) {
            names.addAll(Arrays.asList(watched.asText().toLowerCase(Locale.ROOT).split("\n")));
        }
        String text = statement.toLowerCase(Locale.ROOT);
        Matcher into = INTO.matcher(statement);
        if (!into.find()) {
            return names.stream().anyMatch(text::contains);
        }
        String table = into.group(4).replace("`", "").toLowerCase(Locale.ROOT);  // what it reads is none of its changes
        JsonNode place = begun.get("properties").get("millrace.database");
        String of = into.group(3) == null ? database : into.group(3).replace("`", "");
        return names.contains(table) && (place == null || place.asText().equalsIgnoreCase(of));
    }

    private static String statementBased(String statement) {
        return "a session logs statements in place of rows: have it SET SESSION binlog_format = 'ROW', and take a new snapshot: "
            + statement.substring(0, Math.min(300, statement.length()));
    }

    /** The offsets that the reader gave; what the engine stores goes nowhere, since each batch carries its own. */
    public static final class Offsets extends MemoryOffsetBackingStore {
        @Override
        public void configure(WorkerConfig config) {
            super.configure(config);
            if (!begun.has("offset")) {
                return;
            }
            JsonConverter converter = new JsonConverter();
            converter.configure(Map.of("schemas.enable", "false"), true);
            String name = begun.get("properties").get("name").asText();
            Map<?, ?> partition = MAPPER.convertValue(begun.get("partition"), Map.class);
            Map<?, ?> offset = MAPPER.convertValue(begun.get("offset"), Map.class);
            byte[] key = converter.fromConnectData(name, null, Arrays.asList(name, partition));
            data.put(ByteBuffer.wrap(key), ByteBuffer.wrap(converter.fromConnectData(name, null, offset)));
        }

        @Override
        public Set<Map<String, Object>> connectorPartitions(String connector) {
            return Set.of();
        }
    }

    /**
     * The schema history: the records that the reader gave. What the engine adds, the reader stores; the engine recovers its
     * tables from the history only when it starts, so records do not stay here.
     */
    public static final class History extends AbstractSchemaHistory {
        private final List<HistoryRecord> records = new ArrayList<>();
        private boolean stored;

        @Override
        public void configure(Configuration config, HistoryRecordComparator comparator, SchemaHistoryListener listener, boolean useCatalog) {
            super.configure(config, comparator, listener, useCatalog);
            if (records.isEmpty() && begun.has("history")) {
                for (JsonNode each : begun.get("history")) {
                    try {
                        records.add(new HistoryRecord(DocumentReader.defaultReader().read(each.asText())));
                    } catch (IOException error) {
                        throw new SchemaHistoryException("a record of the schema history cannot be read", error);
                    }
                }
            }
        }

        @Override
        protected void storeRecord(HistoryRecord record) {
            try {
                send('H', DocumentWriter.defaultWriter().writeAsBytes(record.document()));
            } catch (IOException error) {
                throw new SchemaHistoryException("the reader of the schema history has ended", error);
            }
            stored = true;
        }

        @Override
        protected void recoverRecords(Consumer<HistoryRecord> each) {
            records.forEach(each);
        }

        @Override
        public boolean exists() {
            return stored || !records.isEmpty();
        }

        @Override
        public boolean storageExists() {
            return true;
        }
    }

    /** Writes batches as frames of a bounded size, and waits for the acknowledgement of each. */
    private static final class Batches implements DebeziumEngine.ChangeConsumer<ChangeEvent<SourceRecord, SourceRecord>> {
        private final Map<Schema, Boolean> known = new IdentityHashMap<>();
        private final Map<String, byte[]> described = new HashMap<>();

        @Override
        public void handleBatch(
            List<ChangeEvent<SourceRecord, SourceRecord>> events,
            DebeziumEngine.RecordCommitter<ChangeEvent<SourceRecord, SourceRecord>> committer
        ) throws InterruptedException {
            try {
                for (int first = 0; first < events.size();) {
                    first = frame(events, first, committer);
                }
                committer.markBatchFinished();
            } catch (IOException gone) {
                throw new InterruptedException("the reader has ended");
            }
        }

        /** Send events from `first` on as one frame, wait for its acknowledgement, and return the place after its last one. */
        private int frame(
            List<ChangeEvent<SourceRecord, SourceRecord>> events,
            int first,
            DebeziumEngine.RecordCommitter<ChangeEvent<SourceRecord, SourceRecord>> committer
        ) throws IOException, InterruptedException {
            List<byte[]> lines = new ArrayList<>();
            int after = first;
            int boundary = -1;
            for (long size = 0; after < events.size() && size < FRAME_BYTES; after++) {
                SourceRecord record = events.get(after).value();
                if (between(record)) {
                    boundary = after;
                }
                lines.add(line(record, describe(record)));
                size += lines.get(lines.size() - 1).length;
            }
            // Which lines have an offset is known at the end only: the last end of a transaction, and the last line.
            Frame body = new Frame();
            for (int place = first; place < after; place++) {
                byte[] line = lines.set(place - first, null);
                body.write(line, 0, line.length - 1);
                if (place == boundary || place == after - 1) {
                    offset(body, events.get(place).value());
                }
                body.write('}');
                body.write('\n');
            }
            body.send('B');
            ACKNOWLEDGED.take();
            for (int place = first; place < after; place++) {
                committer.markProcessed(events.get(place));
            }
            return after;
        }

        private static byte[] line(SourceRecord record, boolean described) throws IOException {
            ByteArrayOutputStream line = new ByteArrayOutputStream(512);
            JsonGenerator json = JSON.createGenerator(line);
            event(json, record, described);
            json.close();
            return line.toByteArray();
        }

        private static void offset(OutputStream body, SourceRecord record) throws IOException {
            body.write(",\"p\":".getBytes(StandardCharsets.UTF_8));
            body.write(MAPPER.writeValueAsBytes(record.sourcePartition()));
            body.write(",\"f\":".getBytes(StandardCharsets.UTF_8));
            body.write(MAPPER.writeValueAsBytes(record.sourceOffset()));
        }

        /** Whether no transaction is open after the record: it ends one, or is a notification. */
        private static boolean between(SourceRecord record) {
            Schema schema = record.valueSchema();
            return record.value() instanceof Struct && schema.field("op") == null
                && (schema.field("aggregate_type") != null
                    || schema.field("status") != null && "END".equals(((Struct) record.value()).getString("status")));
        }

        /** Send the columns of the record's table, if they are not the ones that were sent last. Returns whether it did. */
        private boolean describe(SourceRecord record) throws IOException {
            Schema schema = record.valueSchema();
            Field after = schema == null ? null : schema.field("after");
            if (after == null || record.keySchema() == null || known.putIfAbsent(schema, true) != null) {
                return false;
            }
            ByteArrayOutputStream body = new ByteArrayOutputStream();
            JsonGenerator json = JSON.createGenerator(body);
            json.writeStartObject();
            json.writeStringField("table", table((Struct) record.value()));
            json.writeArrayFieldStart("key");
            if (record.keySchema() != null) {
                for (Field each : record.keySchema().fields()) {
                    json.writeString(each.name());
                }
            }
            json.writeEndArray();
            json.writeArrayFieldStart("columns");
            for (Field each : after.schema().fields()) {
                json.writeStartObject();
                json.writeStringField("name", each.name());
                json.writeStringField("type", each.schema().type().getName());
                json.writeStringField("meaning", each.schema().name());
                json.writeBooleanField("optional", each.schema().isOptional());
                json.writeBooleanField("default", each.schema().defaultValue() != null);
                json.writeObjectFieldStart("parameters");
                Map<String, String> parameters = each.schema().parameters();
                for (Map.Entry<String, String> pair : (parameters == null ? Map.<String, String>of() : parameters).entrySet()) {
                    json.writeStringField(pair.getKey(), pair.getValue());
                }
                json.writeEndObject();
                json.writeEndObject();
            }
            json.writeEndArray();
            json.writeEndObject();
            json.close();
            String name = table((Struct) record.value());
            if (Arrays.equals(described.put(name, body.toByteArray()), body.toByteArray())) {
                return false;
            }
            send('S', body.toByteArray());
            return true;
        }

        private static String table(Struct value) {
            Struct source = value.getStruct("source");
            Field outer = source.schema().field("schema");
            return source.getString(outer == null ? "db" : "schema") + "." + source.getString("table");
        }

        /** One event: t table, o operation, k key, a after, b before, s snapshot, m milliseconds, g transaction, d described, n words. */
        private static void event(JsonGenerator json, SourceRecord record, boolean described) throws IOException {
            json.writeStartObject();
            Struct value = record.value() instanceof Struct ? (Struct) record.value() : null;
            Schema schema = record.valueSchema();
            if (value != null && schema.field("op") != null && schema.field("source") != null) {
                Struct source = value.getStruct("source");
                json.writeStringField("t", table(value));
                json.writeStringField("o", value.getString("op"));
                json.writeStringField("s", source.getString("snapshot"));
                json.writeNumberField("m", source.getInt64("ts_ms"));
                if (described) {
                    json.writeBooleanField("d", true);
                }
                String snapshot = source.getString("snapshot");
                boolean logged = snapshot == null || snapshot.equals("false");
                if (record.key() instanceof Struct) {
                    json.writeFieldName("k");
                    struct(json, (Struct) record.key(), logged);
                }
                for (String part : new String[] {"after", "before"}) {
                    if (schema.field(part) != null && value.getStruct(part) != null) {
                        json.writeFieldName(part.substring(0, 1));
                        struct(json, value.getStruct(part), logged);
                    }
                }
                Struct transaction = schema.field("transaction") == null ? null : value.getStruct("transaction");
                if (transaction != null) {
                    // PostgreSQL's has the position of each change behind the transaction.
                    boolean numbered = source.schema().field("txId") != null && source.getInt64("txId") != null;
                    json.writeStringField("g", numbered ? source.getInt64("txId").toString() : transaction.getString("id"));
                }
            } else if (value != null && schema.field("status") != null) {  // BEGIN and END of a transaction
                json.writeStringField("o", value.getString("status"));
                json.writeStringField("g", value.getString("id"));
                json.writeNumberField("m", value.getInt64("ts_ms"));
            } else if (value != null && schema.field("ddl") != null && schema.field("tableChanges") != null) {
                json.writeStringField("o", "ddl");
                json.writeStringField("s", value.getStruct("source").getString("snapshot"));
                json.writeNumberField("m", value.getInt64("ts_ms"));
                json.writeStringField("n", value.getString("ddl"));
                json.writeFieldName("a");
                value(json, schema.field("tableChanges").schema(), value.get("tableChanges"), false);
            } else if (value != null && schema.field("aggregate_type") != null) {  // a notification
                json.writeStringField("o", "notification");
                json.writeStringField("n", value.getString("aggregate_type") + ": " + value.getString("type"));
                json.writeFieldName("a");
                MAPPER.writeValue(json, value.get("additional_data"));
            } else if (value == null && record.key() != null) {
                json.writeStringField("o", "tombstone");
            } else {
                json.writeStringField("o", "heartbeat");
            }
            json.writeEndObject();
        }

        private static void struct(JsonGenerator json, Struct value, boolean logged) throws IOException {
            json.writeStartObject();
            for (Field each : value.schema().fields()) {
                json.writeFieldName(each.name());
                Object found = value.getWithoutDefault(each.name());
                if (PostgresValues.isUnchanged(found)) {
                    throw new DebeziumException("an update leaves the long value of the column " + each.name()
                        + " alone and does not log it: run ALTER TABLE ... REPLICA IDENTITY FULL, and take a new snapshot");
                }
                value(json, each.schema(), found, logged);
            }
            json.writeEndObject();
        }

        /** A value, `logged` if it is not of a snapshot. */
        private static void value(JsonGenerator json, Schema schema, Object value, boolean logged) throws IOException {
            if (value == null) {
                json.writeNull();
                return;
            }
            String meaning = schema.name() == null ? "" : schema.name();
            switch (meaning) {
                // The log has numbers of labels, and Debezium's list of labels has them as SQL writes them.
                case "io.debezium.data.Enum", "io.debezium.data.EnumSet" -> json.writeString(logged ? label((String) value) : (String) value);
                case "io.debezium.time.MicroTime" -> json.writeString(span((Long) value));
                case "io.debezium.data.Bits" -> json.writeNumber(bits(bytes(value)));
                case PostgresValues.JSON -> json.writeRawValue((String) value);
                case "org.apache.kafka.connect.data.Decimal" -> {
                    String text = ((BigDecimal) value).toPlainString();
                    if (digits(schema) > MAX_DIGITS) {
                        json.writeString(text);
                    } else {
                        json.writeNumber(text);
                    }
                }
                default -> plain(json, schema, value, logged);
            }
        }

        private static String label(String text) {
            StringBuilder found = new StringBuilder(text.length());
            for (int place = 0; place < text.length(); place++) {
                char each = text.charAt(place);
                if (each == '\\' && place + 1 < text.length()) {
                    each = text.charAt(++place);
                    int escape = "0btnrZ".indexOf(each);
                    each = escape < 0 ? each : "\0\b\t\n\r\u001a".charAt(escape);
                }
                found.append(each);
            }
            return found.toString();
        }

        private static void plain(JsonGenerator json, Schema schema, Object value, boolean logged) throws IOException {
            switch (schema.type()) {
                case INT8, INT16, INT32, INT64 -> json.writeNumber(((Number) value).longValue());
                case FLOAT32 -> json.writeNumber((Float) value);
                case FLOAT64 -> json.writeNumber((Double) value);
                case BOOLEAN -> json.writeBoolean((Boolean) value);
                case STRING -> json.writeString((String) value);
                case BYTES -> json.writeBinary(bytes(value));
                case ARRAY -> {
                    json.writeStartArray();
                    for (Object each : (List<?>) value) {
                        value(json, schema.valueSchema(), each, logged);
                    }
                    json.writeEndArray();
                }
                case MAP -> MAPPER.writeValue(json, value);
                case STRUCT -> struct(json, (Struct) value, logged);
                default -> throw new IOException("a value of type " + schema.type());
            }
        }

        private static int digits(Schema schema) {
            String found = schema.parameters() == null ? null : schema.parameters().get("connect.decimal.precision");
            return found == null ? 0 : Integer.parseInt(found);
        }

        private static byte[] bytes(Object value) {
            if (value instanceof byte[]) {
                return (byte[]) value;
            }
            ByteBuffer buffer = ((ByteBuffer) value).duplicate();
            byte[] found = new byte[buffer.remaining()];
            buffer.get(found);
            return found;
        }

        /** BIT(n): little-endian, up to 64 bits, so that a number has it without a sign. */
        private static java.math.BigInteger bits(byte[] value) {
            byte[] found = new byte[value.length];
            for (int place = 0; place < value.length; place++) {
                found[place] = value[value.length - 1 - place];
            }
            return new java.math.BigInteger(1, found);
        }

        /** A TIME, which reaches from -838:59:59 to 838:59:59. */
        private static String span(long micros) {
            long left = Math.abs(micros);
            return String.format("%s%02d:%02d:%02d.%06d", micros < 0 ? "-" : "", left / 3_600_000_000L, left / 60_000_000L % 60,
                left / 1_000_000L % 60, left % 1_000_000L);
        }
    }
}
