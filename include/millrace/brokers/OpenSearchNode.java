import java.lang.reflect.Constructor;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.function.Supplier;

/**
 * One OpenSearch node inside this JVM, from the jars on the class path alone: no installation, no plugin folders, no security manager.
 * Run from source (java OpenSearchNode.java HOME PLUGIN,PLUGIN name=value ...), so by reflection: what compiles it has no class path.
 */
public class OpenSearchNode {
    private static Class<?> named(String name) throws Exception {
        return Class.forName(name);
    }

    public static void main(String[] arguments) throws Exception {
        Path home = Path.of(arguments[0]).toAbsolutePath();
        Path config = home.resolve("config");
        Files.createDirectories(config);
        Class<?> settings = named("org.opensearch.common.settings.Settings");
        Object builder = settings.getMethod("builder").invoke(null);
        var put = builder.getClass().getMethod("put", String.class, String.class);
        put.invoke(builder, "path.home", home.toString());
        for (int place = 2; place < arguments.length; place++) {
            String[] pair = arguments[place].split("=", 2);
            put.invoke(builder, pair[0], pair[1]);
        }
        Object environment = named("org.opensearch.node.InternalSettingsPreparer")
            .getMethod("prepareEnvironment", settings, Map.class, Path.class, Supplier.class)
            .invoke(null, builder.getClass().getMethod("build").invoke(builder), Map.of(), config, (Supplier<String>) () -> "one");
        List<Object> plugins = new ArrayList<>();
        for (String plugin : arguments[1].split(",")) {
            plugins.add(named(plugin));
        }
        Constructor<?> made = named("org.opensearch.node.Node")
            .getDeclaredConstructor(named("org.opensearch.env.Environment"), Collection.class, boolean.class);
        made.setAccessible(true);
        AutoCloseable node = (AutoCloseable) made.newInstance(environment, plugins, false);
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            try {
                node.close();
            } catch (Exception error) {
                error.printStackTrace();
            }
        }));
        node.getClass().getMethod("start").invoke(node);
        Thread.currentThread().join();
    }
}
