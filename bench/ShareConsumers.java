import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.FeatureUpdate;
import org.apache.kafka.clients.admin.UpdateFeaturesOptions;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * Kafka's share consumers (KIP-932) in one JVM, a thread each: every record is acknowledged by itself, and every poll's
 * acknowledgements are committed before the next. Arguments: servers, topic, group, consumers, records. Prints the
 * seconds from the first record to the last commit.
 */
public final class ShareConsumers {
    public static void main(String[] args) throws Exception {
        String servers = args[0], topic = args[1], group = args[2];
        int consumers = Integer.parseInt(args[3]);
        long records = Long.parseLong(args[4]);
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", servers))) {
            short level = admin.describeFeatures().featureMetadata().get().finalizedFeatures().containsKey("share.version")
                ? admin.describeFeatures().featureMetadata().get().finalizedFeatures().get("share.version").maxVersionLevel()
                : 0;
            if (level < 1) {
                FeatureUpdate up = new FeatureUpdate((short) 1, FeatureUpdate.UpgradeType.UPGRADE);
                admin.updateFeatures(Map.of("share.version", up), new UpdateFeaturesOptions()).all().get();
            }
            ConfigResource resource = new ConfigResource(ConfigResource.Type.GROUP, group);
            ConfigEntry earliest = new ConfigEntry("share.auto.offset.reset", "earliest");
            admin.incrementalAlterConfigs(
                Map.of(resource, List.of(new AlterConfigOp(earliest, AlterConfigOp.OpType.SET)))).all().get();
        }
        Properties settings = new Properties();
        settings.putAll(Map.of(
            "bootstrap.servers", servers,
            "group.id", group,
            "share.acknowledgement.mode", "explicit",
            "max.poll.records", "500",
            "key.deserializer", ByteArrayDeserializer.class.getName(),
            "value.deserializer", ByteArrayDeserializer.class.getName()));
        AtomicLong done = new AtomicLong(), first = new AtomicLong(), last = new AtomicLong();
        long limit = System.nanoTime() + 300_000_000_000L;
        List<Thread> threads = new ArrayList<>();
        for (int number = 0; number < consumers; number++) {
            Thread thread = new Thread(() -> {
                try (KafkaShareConsumer<byte[], byte[]> consumer = new KafkaShareConsumer<>(settings)) {
                    consumer.subscribe(List.of(topic));
                    while (done.get() < records && System.nanoTime() < limit) {
                        long count = 0;
                        for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                            first.compareAndSet(0, System.nanoTime());
                            consumer.acknowledge(record, AcknowledgeType.ACCEPT);
                            count++;
                        }
                        if (count > 0) {
                            consumer.commitSync();
                            last.set(System.nanoTime());
                            done.addAndGet(count);
                        }
                    }
                }
            });
            thread.start();
            threads.add(thread);
        }
        for (Thread thread : threads) {
            thread.join();
        }
        if (done.get() < records) {
            System.err.println("only " + done.get() + " of " + records + " records came");
            System.exit(1);
        }
        System.out.println((last.get() - first.get()) / 1e9);
    }
}
