"""SuperNodes that are users of their own: what one's ClientApp can open of another's.

Where other users cannot reach the Python that runs the tests (it lies in a private home), they can in a mount
namespace of the test's own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hedgerow.sim.deploy.users import NodeUsers, NoUsersError

CLIENT_APP = """
import os

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

def opens(path):
    try:
        return bool(os.listdir(path)) if os.path.isdir(path) else bool(open(path, "rb").read())
    except PermissionError:
        return False

@app.query()
def count(message: Message, context: Context) -> Message:
    config = context.node_config
    paths = [str(config["data"]), *str(context.run_config["paths"]).split(":")]
    answer = {"partition": config["partition-id"], "user": os.getuid()}
    answer["opened"] = [int(opens(path)) for path in paths]
    return Message(RecordDict({"answer": MetricRecord(answer)}), reply_to=message)
"""

DRIVER = """
import json, sys
from pathlib import Path

from hedgerow.sim import Deployment

app, scratch = Path(sys.argv[1]), Path(sys.argv[2])
files = [scratch / f"node-{i}.csv" for i in range(2)]
configs = [{"data": str(file)} for file in files]
with Deployment(app, 2, tls=True, node_config=configs, own_users=True) as deployment:
    kept = [deployment.home / f"node{i}" / "files" / "data.csv" for i in range(2)]
    keys = [deployment.home / "keys" / f"node{i}" for i in range(2)]
    homes = [deployment.home / f"node{i}" for i in range(2)]
    others = [deployment.home, deployment.logs, deployment.home / "cli", deployment.home / "superlink"]
    paths = ":".join(map(str, [*kept, *keys, *homes, *files, *others]))
    plan = deployment.plan(f'paths="{paths}" output-dir="{scratch / "out"}"')
    run = deployment.submit(plan, echo=False)
    end = run.wait(300)
    modes = [oct(path.stat().st_mode & 0o777) for path in (*kept, *homes, *keys)]
    users = {"asked": deployment.users, "of": [path.stat().st_uid for path in kept], "modes": modes}
    print("".join(run.lines[-20:]), file=sys.stderr)
    print(json.dumps({"code": end.exit_code, "no": deployment.no_users, **users}))
"""

# A private namespace in which the first closed folder above Python is open, and holds that Python alone.
NAMESPACE = """
set -e
mount --make-rprivate /
mount --bind "$2" "$3"
mount -t tmpfs -o mode=755 none "$1"
mkdir -p "$2"
mount --bind "$3" "$2"
shift 3
exec "$@"
"""


def reaching_python(scratch: Path) -> list[str]:
    """Return what goes before a command so that other users can run this Python; skip where nothing can."""
    try:
        NodeUsers(1).close()
    except NoUsersError as error:
        prefix = Path(sys.base_prefix)
        closed = [folder for folder in reversed(prefix.parents) if not folder.stat().st_mode & 0o001]
        wrapped = ["unshare", "--mount", "sh", "-c", NAMESPACE, "sh"]
        wrapped += [str((closed or [prefix])[0]), str(prefix), str(scratch)]
        probe = "from hedgerow.sim.deploy.users import NodeUsers; NodeUsers(1)"
        shown = subprocess.run(
            [*wrapped, sys.executable, "-c", probe], capture_output=True, text=True, check=False
        )
        if not closed or os.geteuid() or shown.returncode:
            pytest.skip(f"{error}; and in a namespace: {shown.stderr[-300:]}")
        return wrapped
    return []


@pytest.mark.slow
def test_a_nodes_process_cannot_open_anothers_file_key_or_home(tiny_app: Path, tmp_path: Path) -> None:
    (tmp_path / "python").mkdir()
    before = reaching_python(tmp_path / "python")
    module = tiny_app / "tinyapp"
    (module / "client_app.py").write_text(CLIENT_APP)
    project = tiny_app / "pyproject.toml"
    project.write_text(project.read_text().replace('output-dir = "runs"', 'output-dir = "runs"\npaths = ""'))
    for i in range(2):
        (tmp_path / f"node-{i}.csv").write_text(f"id,x\n{i},1\n")
        (tmp_path / f"node-{i}.csv").chmod(0o600)
    command = [*before, sys.executable, "-c", DRIVER, str(tiny_app), str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert shown.returncode == 0, shown.stderr[-3000:]
    told = json.loads(shown.stdout.splitlines()[-1])
    assert (told["code"], told["no"]) == (0, ""), (told, shown.stderr[-3000:])
    assert told["modes"] == ["0o400", "0o400", "0o700", "0o700", "0o400", "0o400"]
    (answers,) = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [answer["user"] for answer in answers] == told["asked"] == told["of"]
    assert len({0, *told["asked"]}) == 3
    # Its own data; copies, keys and homes of node 0 and 1; the originals; what is the owner's.
    mine, theirs = [1, 0], [0, 1]
    assert answers[0]["opened"] == [1, *mine, *mine, *mine, *[0] * 6]
    assert answers[1]["opened"] == [1, *theirs, *theirs, *theirs, *[0] * 6]
