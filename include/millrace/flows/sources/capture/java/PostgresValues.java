package millrace;

import io.debezium.DebeziumException;
import io.debezium.connector.postgresql.UnchangedToastedReplicationMessageColumn;
import io.debezium.spi.converter.CustomConverter;
import io.debezium.spi.converter.RelationalColumn;
import java.util.Base64;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;
import java.util.Properties;
import java.util.function.Function;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.kafka.connect.data.SchemaBuilder;

/**
 * Converts the texts of PostgreSQL's values, from the snapshot and from the replication stream alike, as docs/capture.md lists them.
 *
 * <p>The sessions have DateStyle ISO, IntervalStyle iso_8601, bytea_output hex, lc_monetary C and the zone UTC. The property "domains" has the base
 * type of each domain and of each array of one: posint=int4,_posint=_int4. The property "digits" has the modifier of each domain of a numeric
 * that limits them. The parameters "millrace.type", "millrace.precision" and "millrace.scale" of a column's schema say what it is. A column of schema {@link #JSON} holds a text that is JSON.
 */
public final class PostgresValues implements CustomConverter<SchemaBuilder, RelationalColumn> {
    /** Name of the schema of a text that is JSON, to be written as it is. */
    static final String JSON = "millrace.Json";

    /** In place of a long value that an update leaves alone and does not log. Each is known as this one object. */
    private static final String UNCHANGED = new String("unchanged");
    private static final byte[] UNCHANGED_BYTES = new byte[0];

    private static final Pattern NUMBER = Pattern.compile("-?[0-9]+(\\.[0-9]+)?([eE][-+]?[0-9]+)?");
    private static final Pattern MOMENT = Pattern.compile("([0-9]{4,}-[0-9]{2}-[0-9]{2}) ([0-9:]{8})(\\.[0-9]+)?(\\+00)?");
    private static final Pattern CLOCK = Pattern.compile("([0-9:]{8})(\\.[0-9]+)?([-+][0-9:]+)?");
    private final Map<String, String> domains = new HashMap<>();
    private final Map<String, String> digits = new HashMap<>();

    @Override
    public void configure(Properties properties) {
        pairs(properties.getProperty("domains", ""), domains);
        pairs(properties.getProperty("digits", ""), digits);
    }

    private static void pairs(String text, Map<String, String> found) {
        for (String each : text.split(",")) {
            int place = each.indexOf('=');
            if (place > 0) {
                found.put(each.substring(0, place), each.substring(place + 1));
            }
        }
    }

    /** Whether the log lacks the value of a field. */
    static boolean isUnchanged(Object value) {
        return value == UNCHANGED || value == UNCHANGED_BYTES;
    }

    @Override
    public void converterFor(RelationalColumn column, ConverterRegistration<SchemaBuilder> registration) {
        String type = type(column.typeName());
        boolean binary = type.equals("bytea");
        Function<String, String> json = type.startsWith("_") ? json(type.substring(1)) : json(type);
        SchemaBuilder schema = binary ? SchemaBuilder.bytes() : json == null && !type.startsWith("_") ? SchemaBuilder.string() : named();
        schema.parameter("millrace.type", type);
        if (type.equals("numeric")) {
            digits(column, schema);
        }
        registration.register(schema.optional(), value -> {
            if (value == null) {
                return null;
            }
            if (UnchangedToastedReplicationMessageColumn.isUnchangedToastedValue(value)) {
                return binary ? UNCHANGED_BYTES : UNCHANGED;
            }
            if (!(value instanceof String)) {  // the default of a column, which nobody asks for
                return binary ? new byte[0] : schema.name() == null ? value.toString() : "null";
            }
            String text = (String) value;
            if (binary) {
                return bytes(text);
            }
            if (type.startsWith("_")) {
                return new Array(text, type.equals("_box") ? ';' : ',', json == null ? PostgresValues::quoted : json).json();
            }
            return json == null ? text : json.apply(text);
        });
    }

    /** The digits of a numeric, if their number is limited. A scale has eleven bits and may be negative. */
    private void digits(RelationalColumn column, SchemaBuilder schema) {
        int length = column.length().orElse(0);
        int scale = column.scale().orElse(0);
        String modifier = digits.get(plain(column.typeName()));
        if (modifier != null) {
            length = Integer.parseInt(modifier) - 4 >> 16 & 0xFFFF;
            scale = Integer.parseInt(modifier) - 4;
        }
        if (length > 0 && length <= 1000) {
            schema.parameter("millrace.precision", Integer.toString(length));
            schema.parameter("millrace.scale", Integer.toString(((scale & 0x7FF) ^ 0x400) - 0x400));
        }
    }

    private static SchemaBuilder named() {
        return SchemaBuilder.string().name(JSON);
    }

    private static String plain(String name) {
        return name.substring(name.lastIndexOf('.') + 1).replace("\"", "").replaceAll("\\(.*\\)", "");
    }

    /** The name of a base type, without schema, quotes and modifiers. */
    private String type(String name) {
        String found = plain(name);
        found = domains.getOrDefault(found, found).toLowerCase(Locale.ROOT);
        return switch (found) {
            case "serial", "serial4" -> "int4";
            case "bigserial", "serial8" -> "int8";
            case "smallserial", "serial2" -> "int2";
            default -> found;
        };
    }

    /** What makes JSON of a text of a type; null: the text itself is the value. */
    private static Function<String, String> json(String type) {
        return switch (type) {
            case "int2", "int4", "int8", "oid", "float4", "float8", "numeric" -> PostgresValues::number;
            case "money" -> text -> number(text.replace("$", "").replace(",", ""));
            case "bool" -> text -> text.startsWith("t") ? "true" : "false";
            case "timestamp", "timestamptz" -> text -> quoted(moment(text));
            case "time", "timetz" -> text -> quoted(clock(text));
            case "bytea" -> text -> quoted(Base64.getEncoder().encodeToString(bytes(text)));
            default -> null;
        };
    }

    /** NaN and Infinity have no form in JSON: they are texts. */
    private static String number(String text) {
        return NUMBER.matcher(text).matches() ? text : quoted(text);
    }

    /** ISO 8601 with microseconds. What has no form there, infinity and years before Christ, stays as it is. */
    private static String moment(String text) {
        Matcher found = MOMENT.matcher(text);
        return found.matches()
            ? found.group(1) + "T" + found.group(2) + micros(found.group(3)) + (found.group(4) == null ? "" : "Z")
            : text;
    }

    private static String clock(String text) {
        Matcher found = CLOCK.matcher(text);
        return found.matches() ? found.group(1) + micros(found.group(2)) + (found.group(3) == null ? "" : found.group(3)) : text;
    }

    private static String micros(String fraction) {
        return ((fraction == null ? "." : fraction) + "000000").substring(0, 7);
    }

    private static byte[] bytes(String text) {
        if (!text.startsWith("\\x")) {
            throw new DebeziumException("a value of bytea is not in hex: " + text.substring(0, Math.min(20, text.length())));
        }
        byte[] found = new byte[text.length() / 2 - 1];
        for (int place = 0; place < found.length; place++) {
            found[place] = (byte) (Character.digit(text.charAt(2 * place + 2), 16) << 4 | Character.digit(text.charAt(2 * place + 3), 16));
        }
        return found;
    }

    private static String quoted(String text) {
        StringBuilder found = new StringBuilder(text.length() + 2).append('"');
        for (int place = 0; place < text.length(); place++) {
            char each = text.charAt(place);
            if (each == '"' || each == '\\') {
                found.append('\\').append(each);
            } else if (each < ' ') {
                found.append(String.format("\\u%04x", (int) each));
            } else {
                found.append(each);
            }
        }
        return found.append('"').toString();
    }

    /** A text of an array as a list of JSON, nested for each dimension; without the bounds that may be before it. */
    private static final class Array {
        private final String text;
        private final char delimiter;
        private final Function<String, String> json;
        private int place;

        Array(String text, char delimiter, Function<String, String> json) {
            this.text = text;
            this.delimiter = delimiter;
            this.json = json;
            this.place = text.startsWith("[") ? text.indexOf('=') + 1 : 0;
        }

        String json() {
            StringBuilder found = new StringBuilder();
            list(found);
            if (place != text.length()) {
                throw new DebeziumException("an array cannot be read: " + text);
            }
            return found.toString();
        }

        private void list(StringBuilder found) {
            take('{');
            found.append('[');
            while (text.charAt(place) != '}') {
                if (text.charAt(place) == '{') {
                    list(found);
                } else {
                    found.append(element());
                }
                if (text.charAt(place) == delimiter) {
                    place++;
                    found.append(',');
                }
            }
            take('}');
            found.append(']');
        }

        private String element() {
            StringBuilder found = new StringBuilder();
            if (text.charAt(place) != '"') {
                while (text.charAt(place) != delimiter && text.charAt(place) != '}') {
                    if (text.charAt(place) == '\\') {
                        place++;
                    }
                    found.append(text.charAt(place++));
                }
                return found.toString().equalsIgnoreCase("null") ? "null" : json.apply(found.toString());
            }
            for (place++; text.charAt(place) != '"'; place++) {
                if (text.charAt(place) == '\\') {
                    place++;
                }
                found.append(text.charAt(place));
            }
            place++;
            return json.apply(found.toString());
        }

        private void take(char wanted) {
            if (text.charAt(place++) != wanted) {
                throw new DebeziumException("an array cannot be read: " + text);
            }
        }
    }
}
