"""Finding Java: the order of the places, the versions that do, and the one sentence where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.base.errors import InvalidSettings
from millrace.runtime.java import find_java, install_java, java_version, main


def java(home: Path, version: str | None, *, says: str = "") -> Path:
    """A Java home with a release file of `version`, or a program that answers `says` to -version."""
    (home / "bin").mkdir(parents=True)
    program = home / "bin" / "java"
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)
    if version is not None:
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return home


@pytest.mark.parametrize(("version", "major"), [("17.0.15", 17), ("21", 21), ("1.8.0_392", 1), ("25.0.1", 25)])
def test_the_release_file_tells_the_version(tmp_path: Path, version: str, major: int) -> None:
    assert java_version(java(tmp_path / "jvm", version)) == major


def test_without_a_release_file_java_is_asked(tmp_path: Path) -> None:
    home = java(tmp_path / "jvm", None, says='openjdk version "21.0.2" 2024-01-16')
    assert java_version(home) == 21


def test_a_folder_without_java_has_no_version(tmp_path: Path) -> None:
    assert java_version(tmp_path) is None


def test_java_home_comes_before_the_path_and_the_path_before_the_system(tmp_path: Path) -> None:
    first, second = java(tmp_path / "a", "21.0.1"), java(tmp_path / "b", "17.0.1")
    system = tmp_path / "system"
    third = java(system / "c", "17.0.9")
    path = {"PATH": str(second / "bin")}
    assert find_java(env=path | {"JAVA_HOME": str(first)}, jvm_folder=system) == first
    assert find_java(env=path, jvm_folder=system) == second
    assert find_java(env={"PATH": ""}, jvm_folder=system) == third


def test_a_java_that_spark_does_not_run_on_is_passed_over(tmp_path: Path) -> None:
    system = tmp_path / "system"
    old, new = java(tmp_path / "old", "11.0.2"), java(system / "x", "17.0.9")
    java(system / "a-newer-one", "25.0.1")
    assert find_java(env={"JAVA_HOME": str(old), "PATH": ""}, jvm_folder=system) == new


def test_where_there_is_none_the_error_names_what_was_found_and_what_to_install(tmp_path: Path) -> None:
    java(tmp_path / "system" / "a", "25.0.1")
    with pytest.raises(
        InvalidSettings, match=r"needs Java 17 or 21 \(found only 25\): install it .*openjdk-17-jre-headless"
    ):
        find_java(env={"PATH": ""}, jvm_folder=tmp_path / "system")


def test_the_program_says_one_sentence_and_fails_where_nothing_can_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("millrace.runtime.java._candidates", lambda env, folder: iter([tmp_path]))
    monkeypatch.setattr("millrace.runtime.java.install_java", lambda: False)
    assert main() == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("Millrace needs Java 17 or 21: install it")


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_apt_installs_the_first_package_it_has_and_upgrades_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    program(tmp_path, "apt-get", f'echo "$*" >>"{calls}"; case "$*" in *openjdk-17*) exit 100 ;; esac')
    program(tmp_path, "sudo", 'shift; exec "$@"')  # so that the test does not depend on who runs it
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert install_java()
    update, first, second = calls.read_text().splitlines()
    assert update.endswith("update")
    assert first.endswith("--no-upgrade openjdk-17-jre-headless")
    assert second.endswith("--no-upgrade openjdk-21-jre-headless")


def test_without_apt_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not install_java()


def test_a_user_whose_sudo_would_ask_installs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    program(tmp_path, "apt-get", f'echo "$*" >>"{calls}"')
    program(tmp_path, "sudo", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("millrace.runtime.debian.os.geteuid", lambda: 1000)
    assert not install_java()
    assert not calls.exists()
