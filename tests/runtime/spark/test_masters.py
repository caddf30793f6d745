"""What Spark is told about each kind of master, and about properties of its user."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from millrace.base.errors import InvalidSettings
from millrace.base.settings import Settings, settings_of_executor
from millrace.runtime.spark.masters import CONTAINER, IMAGE, SECRET, TEMPLATE, master_properties, user_properties


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", spark_cores=3, spark_memory="2g")


def with_properties(settings: Settings, tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "spark.conf"
    path.write_text(text)
    return replace(settings, spark_properties=str(path))


def test_a_local_driver_listens_on_loopback_only(settings: Settings) -> None:
    assert master_properties(settings, {}) == {
        "spark.master": "local[3,3]",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }


def test_a_standalone_master_gives_cores_and_yarn_gives_executors(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = master_properties(replace(settings, spark_master="spark://host:7077"), {})
    assert alone["spark.cores.max"] == "3"
    assert alone["spark.task.maxFailures"] == "3"
    yarn = replace(settings, spark_master="yarn", spark_environment="/environment.tar.gz")
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("YARN_CONF_DIR", raising=False)
    with pytest.raises(InvalidSettings, match="HADOOP_CONF_DIR"):
        master_properties(yarn, {})
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop")
    found = master_properties(yarn, {})
    assert (found["spark.executor.instances"], found["spark.executor.cores"]) == ("3", "1")
    assert found["spark.submit.deployMode"] == "client"
    assert found["spark.task.maxFailures"] == "6", "once on each executor, and once more"
    assert "spark.cores.max" not in found
    with pytest.raises(InvalidSettings, match="MILLRACE_SPARK_ENVIRONMENT"):
        master_properties(replace(yarn, spark_environment=""), {})


DYNAMIC = {"spark.dynamicAllocation.enabled": "true"}


@pytest.mark.parametrize("master", ["spark://host:7077", "yarn", "k8s://https://host:6443"])
def test_executors_that_come_and_go_are_at_most_the_jobs_cores(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", "/etc/hadoop")
    settings = replace(settings, spark_master=master, spark_environment="s3a://b/e.tar.gz", spark_cores=6)
    image = {IMAGE: "spark:4.2"}
    fixed = master_properties(settings, image)
    assert not any(name.startswith("spark.dynamicAllocation") for name in fixed)
    found = master_properties(settings, image | DYNAMIC)
    assert "spark.executor.instances" not in found
    assert found["spark.executor.cores"] == "1"
    assert found["spark.dynamicAllocation.maxExecutors"] == "6"
    assert found["spark.dynamicAllocation.minExecutors"] == "1"
    assert found["spark.dynamicAllocation.shuffleTracking.enabled"] == "true"
    assert found["spark.default.parallelism"] == fixed["spark.default.parallelism"] == "6"
    wider = master_properties(settings, image | DYNAMIC | {"spark.executor.cores": "2"})
    assert wider["spark.dynamicAllocation.maxExecutors"] == "3"
    off = master_properties(settings, image | {"spark.dynamicAllocation.enabled": "false"})
    assert off == fixed


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"spark.executor.cores": "many"}, "whole number"),
        ({"spark.executor.cores": "4"}, "the job has 3"),
        ({"spark.executor.cores": "0"}, "the job has 3"),
        ({"spark.dynamicAllocation.minExecutors": "4"}, "more than maxExecutors, 3"),
    ],
)
def test_executors_that_cannot_come_are_refused(settings: Settings, more: dict[str, str], words: str) -> None:
    settings = replace(settings, spark_master="spark://host:7077")
    with pytest.raises(InvalidSettings, match=words):
        master_properties(settings, DYNAMIC | more)


def test_a_local_driver_has_no_executors_that_come_and_go(settings: Settings) -> None:
    with pytest.raises(InvalidSettings, match="MILLRACE_SPARK_MASTER"):
        master_properties(settings, DYNAMIC)


def test_executors_on_kubernetes_are_nobody_s_root_and_get_their_variables_from_a_secret(settings: Settings) -> None:
    kubernetes = replace(settings, spark_master="k8s://https://host:6443", spark_environment="s3a://b/e.tar.gz")
    with pytest.raises(InvalidSettings, match=IMAGE):
        master_properties(kubernetes, {})
    found = master_properties(kubernetes, {IMAGE: "spark:4.2", SECRET: "logins"})
    pod = yaml.safe_load(Path(found[TEMPLATE]).read_text())
    (container,) = pod["spec"]["containers"]
    assert container["name"] == found["spark.kubernetes.executor.podTemplateContainerName"] == CONTAINER
    assert container["envFrom"] == [{"secretRef": {"name": "logins"}}]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert TEMPLATE not in master_properties(kubernetes, {IMAGE: "spark:4.2", TEMPLATE: "/my.yaml"})


def test_properties_are_read_in_spark_s_own_form(settings: Settings, tmp_path: Path) -> None:
    text = """
        # a comment
        spark.yarn.queue                 streaming
        spark.kubernetes.namespace=other
        spark.executor.extraJavaOptions  -Da=1 -Db=2
        spark.kubernetes.executor.secretKeyRef.AWS_SECRET_ACCESS_KEY: logins:key
        spark.kubernetes.executor.secrets.certificates /etc/certificates
        spark.empty
    """
    with pytest.raises(InvalidSettings, match="line 8"):
        user_properties(with_properties(settings, tmp_path, text))
    assert user_properties(with_properties(settings, tmp_path, text.replace("spark.empty", ""))) == {
        "spark.yarn.queue": "streaming",
        "spark.kubernetes.namespace": "other",
        "spark.executor.extraJavaOptions": "-Da=1 -Db=2",
        "spark.kubernetes.executor.secretKeyRef.AWS_SECRET_ACCESS_KEY": "logins:key",
        "spark.kubernetes.executor.secrets.certificates": "/etc/certificates",
    }
    assert user_properties(settings) == {}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("spark.master local", "Millrace sets spark.master itself"),
        ("spark.speculation true", "Millrace sets"),
        ("spark.hadoop.fs.s3a.secret.key abc", "list of processes"),
        ("spark.hadoop.fs.s3a.access.key abc", "list of processes"),
        ("spark.ssl.keyPassword abc", "list of processes"),
        ("spark.kubernetes.authenticate.oauthToken abc", "list of processes"),
        ("queue streaming", "not a property of Spark"),
    ],
)
def test_properties_that_would_change_rows_or_show_secrets_are_refused(
    settings: Settings, tmp_path: Path, line: str, words: str
) -> None:
    with pytest.raises(InvalidSettings, match=words) as refused:
        user_properties(with_properties(settings, tmp_path, line))
    assert "abc" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(settings: Settings) -> None:
    with pytest.raises(InvalidSettings, match=r"/nowhere\.conf cannot be read"):
        user_properties(replace(settings, spark_properties="/nowhere.conf"))


def test_executors_have_folders_of_their_own_and_the_driver_s_workers_have_the_driver_s(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = pickle.dumps(settings)
    assert pickle.loads(sent) == settings
    assert settings_of_executor(settings) is settings
    monkeypatch.setenv("MILLRACE_TASK_FOLDER", str(tmp_path / "tasks"))
    of_task = pickle.loads(sent)
    assert of_task.data_dir.parent == tmp_path / "tasks"
    shared = settings_of_executor(replace(of_task, log_host="10.0.0.1", log_port=7000))
    assert (shared.data_dir, shared.log_host, shared.log_port) == (tmp_path / "tasks" / "shared", "127.0.0.1", 0)
    monkeypatch.setenv("MILLRACE_TASK_DRIVER", "1")
    assert pickle.loads(sent) == settings
    assert settings_of_executor(settings) is settings
