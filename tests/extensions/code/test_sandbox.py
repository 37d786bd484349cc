"""Attacks on every sandbox that works on this machine, and which sandbox is chosen.

Each attack is a program that tries to get out and prints "reached" where it has. Without a sandbox the same
programs do get out, which shows that they can; with one, nothing outside changes.
"""

import dataclasses
import functools
import os
import pathlib
import platform
import shutil
import signal
import socket
import sys
import time
import tomllib

import pytest
from beside import needs
from extras import import_extra
from processes import started, wait_for

from jaxrl.errors import UserError
from jaxrl.rewards import Graders
from jaxrl_code import sandbox as choosing
from jaxrl_code.sandbox import (
    SANDBOXES,
    check_landlock,
    choose_sandbox,
    lockdown,
    logged_choice,
    native,
)
from jaxrl_code.sandbox.native import SandboxLimits, SandboxUnavailable, run_forked

LIMITS = SandboxLimits(seconds=2.0)
REAL = [name for name in SANDBOXES if name != "none"]


def works(name):
    try:
        SANDBOXES[name]().check()
    except SandboxUnavailable as reason:
        return str(reason)
    return ""


@pytest.fixture(scope="module", params=REAL)
def sandbox(request):
    if reason := works(request.param):
        pytest.skip(reason)
    return SANDBOXES[request.param]()


@pytest.fixture
def none():
    return SANDBOXES["none"]()


def printed(sandbox, program, stdin=b"", limits=LIMITS):
    """What the program prints; it may end as it likes."""
    return sandbox.run(program, stdin, limits).stdout.decode()


# What programs can do


def test_a_program_reads_and_prints(sandbox):
    program = "import sys\nprint(input().upper(), __name__)\nprint('why', file=sys.stderr)"
    outcome = sandbox.run(program, b"hello\n", LIMITS)
    assert (outcome.status, outcome.stdout, outcome.stderr) == (0, b"HELLO __main__\n", b"why\n")


@pytest.mark.parametrize(
    "program",
    [
        "import collections, dataclasses, decimal, fractions, heapq, itertools, json, random, re\nprint(42)",
        "import numpy\nprint(int(numpy.arange(42).sum() - 819))",
        "async def f():\n    await asyncio.sleep(0.001)\n    print(42)\nimport asyncio\nasyncio.run(f())",
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(42))",
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass A:\n    n: int\nprint(A(42).n)",
        "class A: pass\nimport copy, pickle\npickle.loads(pickle.dumps(A()))\nprint(42)",
        "print(42)\nimport sys\nsys.exit(0)",
    ],
)
def test_usual_programs_run(sandbox, program):
    outcome = sandbox.run(program, b"", SandboxLimits(seconds=20.0))
    assert (outcome.status, outcome.stdout) == (0, b"42\n"), outcome


def test_threads_with_a_large_stack_run(sandbox):
    """Programs for contests are written so, for deep recursion."""
    program = (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
        "t = threading.Thread(target=lambda: print(f(20000)))\nt.start()\nt.join()"
    )
    assert printed(sandbox, program) == "20000\n"


def test_a_program_that_raises_has_a_status(sandbox):
    outcome = sandbox.run("raise KeyError('lost')", b"", LIMITS)
    assert outcome.status == 1 and b"KeyError: 'lost'" in outcome.stderr


# Limits


@pytest.mark.parametrize(
    "program", ["while True: pass", "x = 9**9**9", "import time\ntime.sleep(600)"]
)
def test_a_program_ends_when_its_time_is_over(sandbox, program):
    outcome = sandbox.run(program + "\nprint('went on')", b"", SandboxLimits(seconds=1.0))
    assert outcome.status != 0 and outcome.stdout == b""


def test_its_processor_time_is_counted(sandbox):
    outcome = sandbox.run("import time\nwhile time.process_time() < 0.5: pass", b"", LIMITS)
    assert outcome.status == 0 and outcome.seconds > 0.2


def test_signals_cannot_be_ignored(sandbox):
    program = (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except Exception: pass\nwhile True: pass"
    )
    assert sandbox.run(program, b"", SandboxLimits(seconds=1.0)).status != 0


def test_memory_is_limited_in_one_process_and_in_sum(sandbox):
    """Five processes of 400 MB have more than the one limit of 512 MB."""
    one = "x = bytearray(1 << 30)\nprint('reached')"
    forks = """
import os
ends = []
for _ in range(5):
    r, w = os.pipe()
    if os.fork() == 0:
        x = bytearray(b"1") * (400 << 20)
        os.write(w, b"reached")
        os._exit(0)
    ends.append(r)
    os.close(w)
print(*(os.read(r, 100).decode() for r in ends))
"""
    mapped = """
import mmap, os
maps = [mmap.mmap(-1, 100 << 20) for _ in range(10)]
print("reached")
"""
    kept_elsewhere = """
import ctypes, os
held = []
for n in range(12):
    held.append(os.memfd_create("x"))
    os.truncate(held[-1], 100 << 20)
print("reached")
"""
    for program in (one, forks, mapped, kept_elsewhere):
        assert "reached" not in printed(sandbox, program), program


def test_memory_that_it_may_have_it_gets(sandbox):
    assert printed(sandbox, "x = bytearray(100 << 20)\nprint('reached')") == "reached\n"


def test_output_is_cut(sandbox):
    program = (
        "import sys\nfor _ in range(500):\n    sys.stdout.write('0' * 10000)\n"
        "    sys.stderr.write('1' * 10000)"
    )
    outcome = sandbox.run(program, b"", SandboxLimits(seconds=20.0))
    assert len(outcome.stdout) <= 1 << 20 and len(outcome.stderr) <= 1 << 20


@pytest.mark.parametrize(
    "bomb",
    [
        "import os\nwhile True:\n    os.fork()",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', '1'], check=True)\nprint('reached')",
        "import multiprocessing as m\nm.get_context('fork').Process(target=print, args=('reached',)).start()",
        "import os\nos.posix_spawn('/bin/echo', ['echo', 'reached'], {})",
        "import os\nos.execv('/bin/echo', ['echo', 'reached'])",
        "import threading\nthreading.stack_size(32768)\nwhile True:\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()",
    ],
)
def test_bombs_of_processes_and_threads(sandbox, bomb):
    outcome = sandbox.run(bomb, b"", LIMITS)
    assert outcome.status != 0 and b"reached" not in outcome.stdout
    assert printed(sandbox, "print('still here')") == "still here\n"


def test_threads_without_memory_are_limited_too(sandbox):
    """Threads that share a stack take no address space, but 26 KB of the kernel each."""
    if platform.machine() != "x86_64":
        pytest.skip("other instructions")
    # again: clone(VM | FS | FILES | SIGHAND | THREAD | SYSVSEM); the new thread pauses, the old one goes on.
    code = "b838000000bf000f050031f631d24d31d24d31c00f0585c075e6b8220000000f05ebf7"
    program = (
        f"import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('{code}'))\n"
        "ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()"
    )
    outcome = sandbox.run(program, b"", SandboxLimits(seconds=60.0))
    # It would go on for a minute of processor time; it is ended before.
    assert outcome.status is None and outcome.seconds < 30


# Attacks. `target` is a folder outside with a file, `{target}` in a program.

LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
ATTACKS = tomllib.loads(pathlib.Path(__file__).with_name("attacks.toml").read_text())
# Each changes content or metadata of the file, or the names in its folder.
CHANGES = ATTACKS["changes"]
# What the machine's rights or file system may forbid anyway.
NEEDS_RIGHTS = {
    "chown",
    "fchown",
    "lchown",
    "chroot",
    "setxattr",
    "removexattr",
    "O_TMPFILE",
    "io_uring",
    "fchmodat2",
    "by a link of its own",
    "copy_file_range",
    "open with O_TRUNC",
    # In a process without a limit of file sizes they write; this one has it.
    "open to write",
    "open to append",
    "fallocate",
    "sendfile",
    "by the root of another",
    "by /proc/self/cwd",
    "utimensat",
}


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "outside"
    folder.mkdir(mode=0o777)
    (folder / "file").write_text("content")
    (folder / "other").write_text("others")
    (folder / "empty").mkdir()
    try:
        os.setxattr(folder / "file", "user.kept", b"1")
    except OSError:
        NEEDS_RIGHTS.add("removexattr")
    return folder


def state(folder):
    """Names, content and metadata of a folder; reading changes the access time alone."""
    found = {}
    for path in sorted([folder, *folder.iterdir()]):
        stat = path.lstat()
        try:
            attributes = {n: os.getxattr(path, n) for n in os.listxattr(path)}
        except OSError:
            attributes = {}
        found[path.name] = (
            stat.st_mode,
            stat.st_uid,
            stat.st_gid,
            stat.st_size,
            stat.st_nlink,
            stat.st_mtime_ns,
            stat.st_ctime_ns,
            attributes,
            path.read_bytes() if path.is_file() else b"",
        )
    return found


def change(attempt, target):
    return (
        f"{LIBC}import os\nd = {str(target)!r}\nf = d + '/file'\n{CHANGES[attempt]}\nprint('tried')"
    )


@pytest.mark.parametrize("attempt", CHANGES)
def test_nothing_outside_changes(sandbox, attempt, target):
    before = state(target)
    printed(sandbox, change(attempt, target))
    assert state(target) == before


@pytest.mark.parametrize("attempt", sorted(CHANGES.keys() - NEEDS_RIGHTS))
def test_without_a_sandbox_the_same_programs_change_it(none, attempt, target):
    before = state(target)
    outcome = none.run(change(attempt, target), b"", LIMITS)
    assert state(target) != before, outcome


def test_it_has_no_place_to_fill(sandbox):
    """Wherever a file could be made, none can: the sum of files is 0 bytes."""
    program = """
import os, tempfile
places = [".", "/", "/tmp", "/var/tmp", "/dev", "/dev/shm", "/run", "/usr", os.path.expanduser("~")]
for place in places:
    try:
        with open(place + "/filled", "wb") as file:
            print("reached", place)
    except OSError:
        pass
for folder in (None, *places):
    try:
        print("reached", tempfile.TemporaryFile(dir=folder))
    except OSError:
        pass
"""
    assert "reached" not in printed(sandbox, program)


READS = ATTACKS["reads"]


@pytest.mark.parametrize("attempt", READS)
def test_nothing_outside_is_read(sandbox, attempt, target, monkeypatch):
    monkeypatch.setenv("JAXRL_TEST_SECRET", "content")
    program = f"{LIBC}import os\nd = {str(target)!r}\nf = d + '/file'\n{READS[attempt]}"
    found = printed(sandbox, program)
    assert "content" not in found and "'file'" not in found


def test_without_a_sandbox_the_same_programs_read_it(none, target):
    for attempt in ("open", "relative", "list", "users"):
        program = f"{LIBC}import os\nd = {str(target)!r}\nf = d + '/file'\n{READS[attempt]}"
        assert "content" in (found := printed(none, program)) or "'file'" in found, attempt


def test_inherited_descriptors_are_closed(sandbox, target):
    inherited = os.open(target / "file", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    try:
        program = (
            "import os\nfor n in range(3, 4096):\n    try: print('open', n, os.fstat(n), os.read(n, 9))\n"
            "    except OSError: pass"
        )
        assert printed(sandbox, program) == ""
    finally:
        os.close(inherited)


def test_existence_of_outside_paths(sandbox, target):
    """Landlock cannot hide it, and says so."""
    program = f"import os\nprint(os.path.exists({str(target / 'file')!r}))"
    visible = printed(sandbox, program) == "True\n"
    assert visible == any("which files exist" in gap for gap in sandbox.gaps)


SOCKETS = ATTACKS["sockets"]
# These reach a server of the test, on any machine with these kinds of sockets.
CERTAIN = ("inet", "unix by its path", "unix, abstract", "unix, datagrams", "a pair, datagrams")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    made = {
        "port": socket.create_server(("127.0.0.1", 0)),
        "path": socket.socket(socket.AF_UNIX),
        "name": socket.socket(socket.AF_UNIX),
        "datagrams": socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
    }
    made["path"].bind(str(folder / "stream"))
    name = f"jaxrl-test-{os.getpid()}"
    made["name"].bind("\0" + name)
    made["datagrams"].bind(str(folder / "datagrams"))
    for kind in ("path", "name"):
        made[kind].listen()
    addresses = {
        "port": made["port"].getsockname()[1],
        "port6": 1,
        "path": str(folder / "stream"),
        "name": name,
        "datagrams": str(folder / "datagrams"),
    }
    try:
        made["port6"] = socket.create_server(("::1", 0), family=socket.AF_INET6)
        addresses["port6"] = made["port6"].getsockname()[1]
    except OSError:
        pass
    yield "".join(f"{name} = {value!r}\n" for name, value in addresses.items())
    for server in made.values():
        server.close()


@pytest.mark.parametrize("kind", SOCKETS)
def test_no_socket_leads_out(sandbox, servers, kind):
    program = f"import socket\n{servers}{SOCKETS[kind]}\nprint('reached')"
    assert printed(sandbox, program) == ""


@pytest.mark.parametrize("kind", CERTAIN)
def test_without_a_sandbox_sockets_lead_out(none, servers, kind):
    program = f"import socket\n{servers}{SOCKETS[kind]}\nprint('reached')"
    assert printed(none, program) == "reached\n"


SIGNALS = ATTACKS["signals"]


@pytest.fixture
def bystander():
    """A process of ours outside, in a session of its own."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with started([command], start_new_session=True) as (process,):
        yield process


def against(process, attempt):
    names = f"pid = {process.pid}\ngroup = {process.pid}\n"
    return f"{LIBC}import os, signal\n{names}{SIGNALS[attempt]}\nprint('reached')"


@pytest.mark.parametrize("attempt", SIGNALS)
def test_other_processes_are_out_of_reach(sandbox, bystander, attempt):
    assert "reached" not in printed(sandbox, against(bystander, attempt))
    assert bystander.poll() is None


def test_without_a_sandbox_signals_arrive(none, bystander):
    assert "reached" in printed(none, against(bystander, "kill"))
    assert bystander.wait() == -signal.SIGKILL


KERNEL = ATTACKS["kernel"]


@pytest.mark.parametrize("attempt", KERNEL)
def test_the_kernel_offers_no_way_out(sandbox, attempt):
    assert "reached" not in printed(sandbox, f"{LIBC}{KERNEL[attempt]}\nprint('reached')")


def test_nothing_outlives_a_program(sandbox):
    """A daemon forks twice and leaves its session; there is no first fork."""
    mark = f"{os.getpid()}.75"
    program = (
        "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork(): os._exit(0)\n"
        f"        os.execv('/bin/sleep', ['sleep', '{mark}'])\nprint('reached')"
    )
    assert "reached" not in printed(sandbox, program)
    commands = (read_if_there(p) for p in pathlib.Path("/proc").glob("[0-9]*/cmdline"))
    assert not any(b"\0" + mark.encode() in command for command in commands)


def read_if_there(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_program_ends_with_the_worker_that_waits_for_it(sandbox, tmp_path):
    """A worker is killed when its own time is over, or with the run."""
    waiter = (
        "from jaxrl_code.sandbox import SANDBOXES\n"
        "from jaxrl_code.sandbox.native import SandboxLimits\n"
        f"SANDBOXES[{sandbox.name!r}]().run('import time\\n"
        "time.sleep(600)', b'', SandboxLimits(seconds=60.0))"
    )
    with started([[sys.executable, "-c", waiter]]) as (process,):
        (child, *_) = wait_for(lambda: programs_of(process.pid))
        time.sleep(0.5)
    wait_for(lambda: not pathlib.Path(f"/proc/{child}").exists() or is_dead(child))


def programs_of(pid):
    """Its children that run a program; looking for libraries starts others for a moment."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        fields = read_if_there(path).rpartition(b")")[2].split()
        command = read_if_there(path.parent / "cmdline")
        if fields and int(fields[1]) == pid and b"def restrict(" in command:
            found.append(int(path.parent.name))
    return found


def is_dead(pid):
    return read_if_there(pathlib.Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()[:1] in (
        [],
        [b"Z"],
    )


# Which sandbox


@dataclasses.dataclass
class Fake:
    name: str
    reason: str = ""

    def __call__(self):
        return self

    def check(self):
        if self.reason:
            raise SandboxUnavailable(self.reason)


def test_the_first_that_works_is_chosen(monkeypatch):
    fakes = {"bubblewrap": Fake("bubblewrap", "is old"), "landlock": Fake("landlock")}
    monkeypatch.setattr(choosing, "SANDBOXES", {**fakes, "none": Fake("none")})
    assert choose_sandbox("auto").name == "landlock"
    assert choose_sandbox("none").name == "none"
    with pytest.raises(
        UserError, match=r"'bubblewrap' has tried bubblewrap: is old; install bubblewrap"
    ):
        choose_sandbox("bubblewrap")


@needs("reward.grader='code'")
def test_code_is_refused_in_one_line_where_no_sandbox_works(monkeypatch):
    logged_choice.cache_clear()
    fakes = {name: Fake(name, f"lacks {name[0]}") for name in REAL}
    monkeypatch.setattr(choosing, "SANDBOXES", {**fakes, "none": SANDBOXES["none"]})
    with pytest.raises(UserError) as error:
        Graders(("code", {}), code_sandbox="auto")
    message = str(error.value)
    assert "\n" not in message and "set reward.code_sandbox='none'" in message
    assert all(f"{name}: lacks {name[0]}" in message for name in REAL)
    with pytest.raises(UserError):
        Graders(("answer", {}), {"programs": ("code", {})}, code_sandbox="auto")
    # Other graders need none, and nor does reading ground truths.
    Graders(("answer", {}), code_sandbox="auto").close()
    Graders(("code", {})).close()


def test_scorers_that_evaluate_answers_are_refused_in_one_line_where_nothing_locks_them(
    monkeypatch,
):
    import_extra("tasks", "reasoning_gym")
    check_landlock.cache_clear()
    monkeypatch.setattr(lockdown, "landlock_version", lambda: 0)
    with pytest.raises(UserError, match="this kernel has no Landlock") as error:
        Graders(("reasoning_gym", {}), code_sandbox="auto")
    assert "\n" not in str(error.value) and "reward.code_sandbox='none'" in str(error.value)
    # By request, and to validate rows.
    Graders(("reasoning_gym", {}), code_sandbox="none").close()
    Graders(("reasoning_gym", {})).close()


@needs("reward.grader='code'")
def test_the_log_says_which_and_what_it_does_not_protect(caplog):
    logged_choice.cache_clear()
    Graders(("code", {}), code_sandbox="none").close()
    Graders(("code", {}), code_sandbox="none").close()
    (record,) = caplog.records
    assert "'none'" in record.getMessage()
    assert "programs can do all that this user can" in record.getMessage()


def test_bubblewrap_that_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "apt install bubblewrap" in works("bubblewrap")


def test_bubblewrap_in_a_folder_of_its_own_is_found(monkeypatch, tmp_path):
    """Such as /opt/bin, or a folder of the user's that PATH names relative to the working directory."""
    if reason := works("bubblewrap"):
        pytest.skip(reason)
    (tmp_path / "own").mkdir()
    shutil.copy(shutil.which("bwrap"), tmp_path / "own" / "bwrap")
    monkeypatch.chdir(tmp_path)
    for folder in (str(tmp_path / "own"), "own"):
        monkeypatch.setenv("PATH", folder)
        assert SANDBOXES["bubblewrap"]().command([])[0] == str(tmp_path / "own" / "bwrap")
        assert works("bubblewrap") == ""
        assert printed(SANDBOXES["bubblewrap"](), "print(42)") == "42\n"


@pytest.mark.parametrize("content", [b"no program", b"#!/no/such/interpreter\n"])
def test_where_bubblewrap_cannot_be_started_the_next_sandbox_is_tried(
    monkeypatch, tmp_path, content
):
    (tmp_path / "bwrap").write_bytes(content)
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    fakes = {"bubblewrap": SANDBOXES["bubblewrap"], "landlock": Fake("landlock")}
    monkeypatch.setattr(choosing, "SANDBOXES", fakes)
    assert choose_sandbox("auto").name == "landlock"


def test_a_kernel_without_landlock_is_named(monkeypatch):
    for version, words in ((0, "has no Landlock"), (2, "has version 2")):
        monkeypatch.setattr("jaxrl_code.sandbox.lockdown.landlock_version", lambda v=version: v)
        assert words in works("landlock")


def test_landlock_takes_every_right_that_the_kernel_knows():
    version = lockdown.landlock_version()
    if not version:
        pytest.skip("this kernel has no Landlock")
    files, network, scopes = lockdown._known_rights()
    expected = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    assert files.bit_count() >= expected
    assert network.bit_count() >= (2 if version >= 4 else 0)
    assert scopes.bit_count() >= (2 if version >= 6 else 0)


# Functions in a forked process, for the scorers of reasoning-gym


@pytest.mark.parametrize("locked", [True, False])
def test_a_function_in_a_forked_process(locked):
    if locked and works("landlock"):
        pytest.skip("this machine has no Landlock or no libseccomp")
    run_forked = functools.partial(native.run_forked, locked=locked)
    assert run_forked(lambda: b"42", LIMITS) == b"42"
    assert run_forked(lambda: bytes(1 // 0), LIMITS) == b""
    assert run_forked(lambda: f"{sorted(os.environ)}".encode(), LIMITS) == b"[]"

    def spin():
        while True:
            pass

    assert run_forked(spin, SandboxLimits(seconds=1.0)) is None
    assert run_forked(lambda: bytes(bytearray(1 << 34)), LIMITS) == b""


def test_a_function_in_a_forked_process_is_locked_down(tmp_path):
    if works("landlock"):
        pytest.skip("this machine has no Landlock or no libseccomp")
    ours = tmp_path / "ours"
    ours.write_text("42")

    def attempts():
        found = []
        for attempt in (ours.read_bytes, ours.unlink, socket.socket, os.fork):
            try:
                attempt()
                found.append(b"x")
            except OSError:
                found.append(b".")
        return b"".join(found)

    assert run_forked(attempts, LIMITS) == b"...."
    assert run_forked(ours.read_bytes, LIMITS, [str(tmp_path)]) == b"42"
    assert ours.read_text() == "42"
