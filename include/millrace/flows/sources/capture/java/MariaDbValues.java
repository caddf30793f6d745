package millrace;

import io.debezium.DebeziumException;
import io.debezium.spi.converter.CustomConverter;
import io.debezium.spi.converter.RelationalColumn;
import java.nio.ByteBuffer;
import java.sql.Timestamp;
import java.time.Instant;
import java.time.LocalDate;
import java.time.LocalDateTime;
import java.time.OffsetDateTime;
import java.time.ZoneOffset;
import java.time.ZonedDateTime;
import java.time.format.DateTimeParseException;
import java.time.temporal.ChronoUnit;
import java.util.Locale;
import java.util.Properties;
import java.util.UUID;
import org.apache.kafka.connect.data.SchemaBuilder;

/**
 * Converts values of MariaDB that Debezium gives another form in the snapshot than from the binary log, or that it replaces.
 *
 * <p>A zero date is null, also where the column is NOT NULL: Debezium's 1970-01-01 cannot be told from that day. The JVM's zone is UTC.
 */
public final class MariaDbValues implements CustomConverter<SchemaBuilder, RelationalColumn> {
    private static final int FIRST_YEAR = 1901;

    @Override
    public void configure(Properties properties) {}

    @Override
    public void converterFor(RelationalColumn column, ConverterRegistration<SchemaBuilder> registration) {
        String type = column.typeName().replaceAll("\\(.*", "").trim().toUpperCase(Locale.ROOT);
        long unit = column.length().orElse(0) > 3 ? 1L : 1_000L;  // microseconds, of a number in place of a date and time
        switch (type) {
            case "DATE" -> registration.register(text("io.debezium.time.Date"), MariaDbValues::date);
            case "DATETIME" -> registration.register(text("io.debezium.time.MicroTimestamp"), value -> moment(value, "", unit));
            case "TIMESTAMP" -> registration.register(text("io.debezium.time.ZonedTimestamp"), value -> moment(value, "Z", unit));
            case "YEAR" -> registration.register(SchemaBuilder.int32().name("io.debezium.time.Year").optional(), MariaDbValues::year);
            case "UUID" -> registration.register(text("io.debezium.data.Uuid"), MariaDbValues::uuid);
            // Names in statements that Debezium does not take for unsigned: the log has signed numbers. A snapshot has the plain names.
            case "INTEGER UNSIGNED", "INTEGER UNSIGNED ZEROFILL", "INT4 UNSIGNED", "INT4 UNSIGNED ZEROFILL" ->
                registration.register(SchemaBuilder.int64().optional(), value -> unsigned(value, 32));
            case "INT3 UNSIGNED", "INT3 UNSIGNED ZEROFILL", "MIDDLEINT UNSIGNED", "MIDDLEINT UNSIGNED ZEROFILL" ->
                registration.register(SchemaBuilder.int32().optional(), value -> narrow(unsigned(value, 24)));
            // A statement says BOOLEAN, and the snapshot finds TINYINT(1), which may be 2.
            case "BOOLEAN", "BOOL" -> registration.register(SchemaBuilder.int16().optional(), MariaDbValues::small);
            case "FLOAT", "FLOAT UNSIGNED", "FLOAT UNSIGNED ZEROFILL" -> {
                if (column.scale().isPresent()) {  // Debezium takes FLOAT(10,2) for a DOUBLE, with the digits that a float lacks
                    registration.register(SchemaBuilder.float32().optional(), MariaDbValues::single);
                }
            }
            default -> { }
        }
    }

    private static SchemaBuilder text(String name) {
        return SchemaBuilder.string().name(name).optional();
    }

    private static String date(Object value) {
        if (value == null) {
            return null;
        }
        if (value instanceof String) {
            LocalDateTime found = parsed((String) value + "T00:00:00");
            return found == null ? null : found.toLocalDate().toString();
        }
        if (value instanceof LocalDate) {
            return value.toString();
        }
        if (value instanceof Integer) {  // the default of a column
            return LocalDate.ofEpochDay((Integer) value).toString();
        }
        throw unknown(value);
    }

    /** ISO 8601 with microseconds. The log has second 0 of 1970 for a TIMESTAMP of zero, which none else can have. */
    private static String moment(Object value, String zone, long unit) {
        LocalDateTime found;
        if (value == null) {
            return null;
        } else if (value instanceof LocalDateTime) {
            found = (LocalDateTime) value;
        } else if (value instanceof Timestamp) {
            found = ((Timestamp) value).toLocalDateTime();
        } else if (value instanceof OffsetDateTime) {
            found = ((OffsetDateTime) value).withOffsetSameInstant(ZoneOffset.UTC).toLocalDateTime();
        } else if (value instanceof ZonedDateTime) {
            found = ((ZonedDateTime) value).withZoneSameInstant(ZoneOffset.UTC).toLocalDateTime();
        } else if (value instanceof Instant) {
            found = LocalDateTime.ofInstant((Instant) value, ZoneOffset.UTC);
        } else if (value instanceof Long) {  // the default of a column
            found = LocalDateTime.ofInstant(Instant.EPOCH.plus(Math.multiplyExact((Long) value, unit), ChronoUnit.MICROS), ZoneOffset.UTC);
        } else if (value instanceof String) {
            found = parsed(((String) value).replace(' ', 'T'));
        } else {
            throw unknown(value);
        }
        if (found == null || !zone.isEmpty() && found.toEpochSecond(ZoneOffset.UTC) == 0 && found.getNano() == 0) {
            return null;
        }
        return CaptureEngine.text(found) + zone;
    }

    private static LocalDateTime parsed(String text) {
        try {
            return LocalDateTime.parse(text);
        } catch (DateTimeParseException none) {  // the default of a column: a zero date, or an expression
            return null;
        }
    }

    /** One byte in the log, in which 0 stands for the year 0000 and 1 for 1901. */
    private static Integer year(Object value) {
        if (value == null) {
            return null;
        }
        int found = value instanceof Number ? ((Number) value).intValue() : Integer.parseInt(value.toString());
        return found == FIRST_YEAR - 1 ? 0 : found;
    }

    private static Long unsigned(Object value, int bits) {
        if (value == null) {
            return null;
        }
        long found = value instanceof Number ? ((Number) value).longValue() : Long.parseLong(value.toString().trim());
        return found < 0 ? found + (1L << bits) : found;
    }

    private static Integer narrow(Long value) {
        return value == null ? null : Math.toIntExact(value);
    }

    private static Short small(Object value) {
        if (value == null || value instanceof Boolean) {
            return value == null ? null : (short) ((Boolean) value ? 1 : 0);
        }
        String text = value.toString();
        return switch (text.toLowerCase(Locale.ROOT)) {
            case "true" -> (short) 1;
            case "false" -> (short) 0;
            default -> Short.valueOf(text);
        };
    }

    private static Float single(Object value) {
        return value == null || value instanceof Float ? (Float) value : Float.valueOf(value.toString());
    }

    /** The log leaves out bytes of zero at the end. */
    private static String uuid(Object value) {
        if (value == null || value instanceof String || value instanceof UUID) {
            return value == null ? null : value.toString().toLowerCase(Locale.ROOT);
        }
        byte[] given;
        if (value instanceof byte[]) {
            given = (byte[]) value;
        } else if (value instanceof ByteBuffer) {
            ByteBuffer buffer = ((ByteBuffer) value).duplicate();
            given = new byte[buffer.remaining()];
            buffer.get(given);
        } else {
            throw unknown(value);
        }
        ByteBuffer found = ByteBuffer.allocate(16).put(given);
        return new UUID(found.getLong(0), found.getLong(8)).toString();
    }

    private static DebeziumException unknown(Object value) {
        return new DebeziumException("a value of " + value.getClass().getName() + " has no conversion");
    }
}
