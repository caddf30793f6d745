"""A pipeline's worker as a launched run: ``python -m millrace.pipelines.deploy FILE``, started once for each run id.

It supervises the worker (millrace.flows.range_host.supervisor) and reports at the end how the worker ended.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from millrace.base.data_folder import restrict_umask
from millrace.base.errors import MillraceError
from millrace.base.files import replace_json
from millrace.base.settings import Settings
from millrace.flows.declare.configuration import read_yaml
from millrace.flows.range_host.supervision import read_end
from millrace.flows.range_host.supervisor import supervise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--progress", type=Path)
    options = parser.parse_args()
    restrict_umask()
    try:
        settings = Settings.load()
        code = supervise(settings, options.file, config=options.config)
    except MillraceError as error:
        told = {"code": error.code, "message": str(error)[:2000], "retriable": error.retriable}
        replace_json(options.result, {"ok": False, "error": told})
        return 1
    if code:
        cause = read_end(settings, str(read_yaml(options.file)["id"])).cause
        words = f"the worker ended again and again; the last one: {cause}"
        told = {"code": "WORKER_ENDED", "message": words[:2000], "retriable": True}
        replace_json(options.result, {"ok": False, "error": told})
    else:
        replace_json(options.result, {"ok": True, "stopped": True, "report": {}})
    return code


if __name__ == "__main__":
    sys.exit(main())
