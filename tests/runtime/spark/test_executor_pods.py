"""Spark's own code makes an executor's pod of what Millrace submits to Kubernetes."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pyspark.sql import SparkSession

from millrace.base.package import ROOT
from millrace.base.settings import Settings
from millrace.runtime.spark.masters import IMAGE, SECRET
from millrace.runtime.spark.session import spark_configuration

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_an_executor_s_pod_is_valid_and_has_all_that_a_task_needs(
    settings: Settings, spark: SparkSession, tmp_path: Path
) -> None:
    properties = tmp_path / "spark.conf"
    properties.write_text(f"{IMAGE} registry.example/spark:4.2.0\n{SECRET} logins\nspark.kubernetes.namespace apart\n")
    submitted = spark_configuration(
        replace(
            settings,
            spark_master="k8s://https://host:6443",
            spark_environment="/opt/environment.tar.gz",
            spark_properties=str(properties),
            spark_cores=4,
        )
    )
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    conf = jvm.org.apache.spark.SparkConf(False)
    for name, value in submitted.items():
        conf.set(name, value)
    conf.set("spark.driver.host", "10.0.0.1").set("spark.driver.port", "7078")
    k8s, option = jvm.org.apache.spark.deploy.k8s, jvm.scala.Option
    made = k8s.KubernetesConf.createExecutorConf(conf, "1", "app", option.empty(), 0)
    security = jvm.org.apache.spark.SparkEnv.get().securityManager()
    client = jvm.io.fabric8.kubernetes.client.KubernetesClientBuilder().build()
    module = jvm.java.lang.Class.forName("org.apache.spark.resource.ResourceProfile$").getField("MODULE$").get(None)
    profile = module.getOrCreateDefaultProfile(conf)
    builder = jvm.org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBuilder()
    built = builder.buildFromFeatures(made, security, client, profile).pod()
    text = jvm.io.fabric8.kubernetes.client.utils.Serialization.asYaml
    pod, container = yaml.safe_load(text(built.pod())), yaml.safe_load(text(built.container()))
    client.close()
    pod["spec"]["containers"] = [container]
    rendered = tmp_path / "executor.yaml"
    rendered.write_text(yaml.safe_dump(pod))
    assert container["image"] == "registry.example/spark:4.2.0"
    assert container["envFrom"] == [{"secretRef": {"name": "logins"}}]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["PATH"].startswith("./environment/bin:"), "Python of the packed environment"
    assert variables["SPARK_EXECUTOR_CORES"] == "1"
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    checked = subprocess.run(
        [ROOT.parent / "tools" / "shipping" / "chart.sh", "--validate", rendered],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
