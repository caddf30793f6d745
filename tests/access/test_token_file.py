"""The file of tokens.

Made and revoked by several processes at once, whole whatever happens, closed to others, or it opens nothing.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.access import token_file
from millrace.access.grants import Caller, Grant, Role
from millrace.access.token_file import MAX_TOKENS, TokenFile
from millrace.base.errors import InvalidArgument, LogBusy, PermissionDenied, TokenFileRefused

READ = (Grant(Role.READ),)
ADDER = """
import sys
from pathlib import Path
from millrace.access.grants import Grant, Role
from millrace.access.token_file import TokenFile
for number in range(int(sys.argv[3])):
    TokenFile(Path(sys.argv[1])).add(f"{sys.argv[2]}-{number}", (Grant(Role.READ),))
"""
KILLED = """
import os, signal
from pathlib import Path
replace = Path.replace
def killed(self, target):
    if "{step}" == "behind":
        replace(self, target)
    os.kill(os.getpid(), signal.SIGKILL)
Path.replace = killed
"""
"""Dies where one file takes the place of another."""


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def file(tmp_path: Path, clock: Clock) -> TokenFile:
    return TokenFile(tmp_path, clock=clock)


def adder(folder: Path, name: str, count: int, *, before: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", before + ADDER, str(folder), name, str(count)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_token_lets_in_whom_it_was_made_for_and_no_other_text_does(file: TokenFile) -> None:
    token, made = file.add("shop", READ)
    assert len(token) >= 43, "256 bits"
    caller = file.authenticate(token)
    assert caller is not None
    assert caller.principal == made.principal
    for other in ("", token[:-1], token + "x", token.upper(), made.sha256, "shop", "\udcff"):
        assert file.authenticate(other) is None


def test_the_file_holds_no_token_and_is_its_owners_alone(file: TokenFile) -> None:
    token, _ = file.add("shop", READ)
    assert token not in file.path.read_text()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.folder.stat().st_mode) == 0o700


def test_what_another_process_writes_is_seen_at_the_next_call(file: TokenFile, tmp_path: Path) -> None:
    writer = TokenFile(tmp_path)
    first, _ = writer.add("first", READ)
    assert file.authenticate(first) is not None
    second, _ = writer.add("second", READ)
    assert file.authenticate(second) is not None
    writer.revoke("first")
    assert file.authenticate(first) is None
    assert file.authenticate(second) is not None
    file.path.unlink()
    assert file.authenticate(second) is None


def test_who_is_in_is_out_once_the_token_is_revoked(
    file: TokenFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_file, "CACHE_SECONDS", 0.0)
    caller, other = (_in(file, name) for name in ("shop", "other"))
    caller.require_valid()
    TokenFile(tmp_path).revoke("shop")
    with pytest.raises(PermissionDenied, match="revoked"):
        caller.require_valid()
    other.require_valid()


def _in(file: TokenFile, name: str) -> Caller:
    caller = file.authenticate(file.add(name, READ)[0])
    assert caller is not None
    return caller


def test_a_name_that_comes_again_is_another_token(file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "CACHE_SECONDS", 0.0)
    before = _in(file, "shop")
    file.revoke("shop")
    after = _in(file, "shop")
    assert not before.is_valid()
    assert after.is_valid()
    assert before != after


def test_a_token_that_ran_out_opens_nothing(file: TokenFile, clock: Clock) -> None:
    token, _ = file.add("shop", READ, expires=clock.now + 10)
    caller = file.authenticate(token)
    assert caller is not None
    clock.now += 10
    assert file.authenticate(token) is None
    assert not caller.is_valid()
    assert [each.expired(clock.now) for each in file.tokens()] == [True]
    with pytest.raises(InvalidArgument, match="must be in the future"):
        file.add("late", READ, expires=clock.now)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o660, 0o644])
def test_a_file_that_others_may_read_or_write_opens_nothing_until_it_is_closed(file: TokenFile, mode: int) -> None:
    token, _ = file.add("shop", READ)
    file.path.chmod(mode)
    with pytest.raises(TokenFileRefused, match="chmod 600"):
        file.authenticate(token)
    with pytest.raises(TokenFileRefused):
        file.add("more", READ)
    file.path.chmod(0o600)
    assert file.authenticate(token) is not None


def test_a_link_in_the_files_place_is_not_followed(file: TokenFile, tmp_path: Path) -> None:
    token, _ = file.add("shop", READ)
    file.path.rename(tmp_path / "elsewhere.json")
    file.path.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(TokenFileRefused):
        file.authenticate(token)


def test_a_flipped_byte_anywhere_lets_nobody_in_or_the_same(file: TokenFile) -> None:
    token, made = file.add("shop", (Grant(Role.READ, ("users",)),))
    whole = file.path.read_bytes()
    for place in range(len(whole)):
        file.path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert [each.principal for each in file.tokens()] == [made.principal], place
        except TokenFileRefused:
            continue
    file.path.write_bytes(whole)
    assert file.authenticate(token) is not None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 1, "body": {"tokens": []}}', "[" * 100_000, "null"])
def test_what_is_no_file_of_tokens_is_refused(file: TokenFile, text: str) -> None:
    token, _ = file.add("shop", READ)
    file.path.write_text(text)
    with pytest.raises(TokenFileRefused, match="is damaged"):
        file.tokens()
    with pytest.raises(TokenFileRefused):
        file.authenticate(token)


def test_a_folder_in_the_files_place_is_refused_by_name(file: TokenFile) -> None:
    file.path.mkdir(parents=True)
    with pytest.raises(TokenFileRefused, match=r"tokens\.json is not a regular file"):
        file.tokens()


def test_a_newer_builds_file_is_left_to_that_build(file: TokenFile) -> None:
    file.add("shop", READ)
    document = json.loads(file.path.read_bytes())
    file.path.write_text(json.dumps(document | {"version": 2}))
    with pytest.raises(TokenFileRefused, match=r"version 2.*newer one"):
        file.tokens()


def test_names_are_taken_once_and_tokens_are_not_without_number(
    file: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_file, "MAX_TOKENS", 3)
    for name in ("a", "b", "c"):
        file.add(name, READ)
    with pytest.raises(InvalidArgument, match="already"):
        file.add("a", READ)
    with pytest.raises(InvalidArgument, match="revoke some"):
        file.add("d", READ)
    with pytest.raises(InvalidArgument, match="no token"):
        file.revoke("d")
    with pytest.raises(InvalidArgument, match="at least one role"):
        file.add("e", ())
    assert MAX_TOKENS == 256


@pytest.mark.parametrize("name", ["", ".", "../root", "a/b", "a b", "x" * 65, "na\nme", "-rf"])
def test_what_is_no_name_is_refused(file: TokenFile, name: str) -> None:
    with pytest.raises(InvalidArgument, match="not a valid token name"):
        file.add(name, READ)


def test_no_token_has_the_name_of_the_machine(file: TokenFile) -> None:
    with pytest.raises(InvalidArgument, match="the machine's own tokens"):
        file.add("machine", READ)


def test_two_processes_that_add_at_once_lose_nothing(tmp_path: Path) -> None:
    adders = [adder(tmp_path, name, 15) for name in ("left", "right")]
    for each in adders:
        assert each.wait(60) == 0, each.communicate()[1]
    names = {each.principal.name for each in TokenFile(tmp_path).tokens()}
    assert names == {f"{name}-{number}" for name in ("left", "right") for number in range(15)}


def test_who_holds_the_lock_for_long_is_not_waited_for(file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "LOCK_SECONDS", 0.05)
    with file._changing(), pytest.raises(LogBusy):
        TokenFile(file.folder.parent).add("shop", READ)


@pytest.mark.parametrize("step, there", [("before", ["old-0"]), ("behind", ["old-0", "new-0"])])
def test_a_kill_while_the_file_is_replaced_leaves_the_one_or_the_other(
    tmp_path: Path, step: str, there: list[str]
) -> None:
    assert adder(tmp_path, "old", 1).wait(60) == 0
    assert adder(tmp_path, "new", 1, before=KILLED.format(step=step)).wait(60) == -signal.SIGKILL
    file = TokenFile(tmp_path)
    assert [each.principal.name for each in file.tokens()] == there
    assert len(list(file.folder.iterdir())) == 2 + (step == "before"), "what it wrote is still there"
    file.add("next", READ)
    assert len(json.loads(file.path.read_text())["body"]["tokens"]) == len(there) + 1
    assert {each.name for each in file.folder.iterdir()} == {"tokens.json", "tokens.lock"}
