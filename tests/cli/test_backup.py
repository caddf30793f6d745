"""`millrace backup`: made beside a running log server, listed, read back, restored into a folder of its own."""

from __future__ import annotations

from pathlib import Path

from millrace.base.settings import Settings
from millrace.rpc.remote_log import RemoteLogService
from tests.cli.deployment import Deployment


def test_a_backup_is_made_while_all_runs_and_the_restored_deployment_goes_on(
    deployment: Deployment, tmp_path: Path
) -> None:
    root = str(tmp_path / "backups")
    deployment.create_users()
    deployment.produce({"id": 1, "name": "Ada"}, {"id": 2, "name": "Grace"})
    deployment.catch_up()
    deployment.produce({"id": 3, "name": "Mary"})
    deployment.ok("tokens", "add", "shop", "--role", "read")
    planned = deployment.as_json("backup", "make", "--to", root, "--dry-run")
    assert planned["id"] == ""
    assert "There is no backup" in deployment.ok("backup", "list", "--in", root)
    made = deployment.as_json("backup", "make", "--to", root)
    deployment.produce({"id": 4, "name": "later"})
    [listed] = deployment.as_json("backup", "list", "--in", root)
    assert (listed["id"], listed["bytes"], listed["log"]) == (made["id"], made["bytes"], "included")
    assert "0 not as they were" in deployment.ok("backup", "verify", root)
    assert "is not empty" in deployment.fails("BACKUP_REFUSED", "backup", "restore", root)
    restored = Deployment(Settings(data_dir=tmp_path / "restored"))
    assert restored.as_json("backup", "restore", root)["id"] == made["id"]
    assert "no tokens" in restored.ok("tokens", "list"), "what lets somebody in is in no backup"
    try:
        restored.produce({"id": 5, "name": "Emmy"})
        restored.catch_up()
        assert sorted(row["id"] for row in restored.lines("read", "users", "--json")) == [1, 2, 3, 5]
        assert restored.as_json("verify")
    finally:
        with RemoteLogService.connect(restored.settings.log_path, start=False) as service:
            service.shutdown()


def test_what_is_no_backup_is_said(deployment: Deployment, tmp_path: Path) -> None:
    deployment.fails("BACKUP_NOT_FOUND", "backup", "verify", str(tmp_path))
    deployment.fails("BACKUP_NOT_FOUND", "backup", "restore", str(tmp_path / "nowhere"))
    deployment.fails("INVALID_ARGUMENT", "backup", "make")
    deployment.fails("INVALID_ARGUMENT", "backup", "list")
    (tmp_path / "backups" / "backup-1").mkdir(parents=True)
    (tmp_path / "backups" / "backup-1" / "manifest.json").write_text("{}")
    result = deployment.run("backup", "verify", str(tmp_path / "backups" / "backup-1"))
    assert (result.exit_code, result.stderr.split(":")[0]) == (3, "BACKUP_DAMAGED")
