"""Builds the box and runs one program in it; a script of its own, so that nothing of the run is in its memory.

    python -I -S launch.py ORDER RESULT    descriptors: the order as JSON, and where the result goes as JSON

Three processes: the launcher, which dies with whoever started it; the first process of the new process namespace,
whose end ends all others there; and the program. In the mode `limits` there are no namespaces: the launcher adopts
what the program leaves behind and ends it.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress

ORDER, RESULT = (int(number) for number in sys.argv[1:3])
PROGRAM = "/program.py"
WORK = "/box"
NOBODY = 65534
# one user a box, so that the kernel's limit of processes a user is one a box; above any range that is handed out
FIRST_USER = 4_000_000_000

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MS_RDONLY, MS_REMOUNT = 2, 4, 4096, 16384, 1 << 18, 1, 32
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_SETATTR = 442
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 38, 36
DEVICES = ("null", "zero", "urandom", "random")
SYSTEM_PYTHON = "/usr/bin/python3"
"""for the mode `limits`, where the run's own lies in a folder that only root may enter"""
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    if getattr(libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    number = libc.mount(
        source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    if number < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} at {target}: {os.strerror(number)}")


def die_with_parent() -> None:
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def new_namespaces() -> int:
    """Leave the namespaces of the host; the user that the program shall be."""
    user, group = os.geteuid(), os.getegid()
    flags = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    if user == 0:
        call("unshare", flags)
        return FIRST_USER + os.getpid() % 10_000_000
    call("unshare", flags | NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    return NOBODY


def build_root(order: dict, user: int) -> None:
    """A file system of its own: the system's programs and Python, read-only, and an empty folder to work in."""
    root = order["folder"]
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("box", root, "tmpfs", MS_NOSUID, "size=1m,nr_inodes=256,mode=755")
    for place in dict.fromkeys((*SYSTEM, order["python_home"])):
        show(place, root)
    os.makedirs(f"{root}/dev")
    for name in DEVICES:
        open(f"{root}/dev/{name}", "w", encoding="ascii").close()
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, MS_BIND)
    with open(root + PROGRAM, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(order["program"])
    os.chmod(root + PROGRAM, 0o444)
    os.mkdir(root + WORK)
    os.mkdir(f"{root}/old")
    os.chdir(root)
    call("syscall", PIVOT_ROOT[os.uname().machine], b".", b"old")
    os.chdir("/")
    call("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")
    mount("box", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)
    size = order["files_mib"]
    mount("work", WORK, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size}m,nr_inodes=1024,mode=700,uid={user},gid={user}")


def show(place: str, root: str) -> None:
    """Make a place of the host visible at the same path, read-only; one that does not exist is passed over."""
    target = root + place
    if os.path.islink(place) and place.count("/") == 1:
        os.symlink(os.readlink(place), target)
        return
    if not os.path.exists(place) or os.path.exists(target):
        return  # or it lies below one that is shown already
    os.makedirs(target if os.path.isdir(place) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(place):
        open(target, "w", encoding="ascii").close()
    mount(place, target, None, MS_BIND | MS_REC)
    read_only = (ctypes.c_uint64 * 4)(MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    call("syscall", MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, read_only, ctypes.sizeof(read_only))


def set_limits(order: dict) -> None:
    memory, files = order["memory_mib"] * 2**20, order["files_mib"] * 2**20
    for kind, value in (
        (resource.RLIMIT_CPU, order["cpu_s"]),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, files),
        (resource.RLIMIT_NPROC, order["processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def become(user: int) -> None:
    """Drop every privilege; in a user namespace the exec that follows does."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def program(order: dict, user: int, place: str, work: str) -> None:
    """Become the program; never returns."""
    try:
        os.setsid()
        os.chdir(work)
        set_limits(order)
        become(user)
        for number in range(32):
            with suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        die_with_parent()  # a change of user takes it back
        os.closerange(3, 4096)
        python = order["python"]
        os.execve(python, [python, "-I", "-S", "-B", "-X", "utf8", place], {})
    finally:
        os._exit(127)


def tell(**result: object) -> None:
    os.write(RESULT, json.dumps(result).encode())


def first_process(order: dict, user: int, alive: int) -> None:
    """Process 1 of the namespace: builds the box, starts the program, and takes all with it at the end."""
    try:
        die_with_parent()
        if not os.get_blocking(alive) and _is_closed(alive):
            return
        build_root(order, user)
    except (OSError, KeyError) as error:
        tell(refused=f"{error}")
        return
    pid = os.fork()
    if pid == 0:
        program(order, user, PROGRAM, WORK)
    while True:
        ended, status = os.wait()
        if ended == pid:
            tell(code=os.waitstatus_to_exitcode(status))
            return


def _is_closed(descriptor: int) -> bool:
    try:
        return os.read(descriptor, 1) == b""
    except BlockingIOError:
        return False


def run_in_namespaces(order: dict) -> None:
    try:
        user = new_namespaces()
    except OSError as error:
        tell(refused=f"{error}")
        return
    alive, kept = os.pipe()
    os.set_blocking(alive, False)
    pid = os.fork()
    if pid == 0:
        try:
            os.close(kept)
            first_process(order, user, alive)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def run_with_limits(order: dict) -> None:
    """No namespaces: what the limits of a process and the user's rights give, and no more."""
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    user = FIRST_USER + os.getpid() % 10_000_000 if os.geteuid() == 0 else os.geteuid()
    python = next((each for each in (order["python"], SYSTEM_PYTHON) if may_run(each, user)), None)
    if python is None:
        tell(refused=f"{order['python']} cannot be run by another user than root")
        return
    order |= {"python": python}
    place, work = f"{order['folder']}/program.py", f"{order['folder']}/box"
    with open(place, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(order["program"])
    os.mkdir(work)
    if os.geteuid() == 0:
        os.chmod(order["folder"], 0o755)
        os.chown(work, user, user)
    pid = os.fork()
    if pid == 0:
        program(order, user, place, work)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGKILL))  # the time or the output is at its limit
    status = os.waitpid(pid, 0)[1]
    for _ in range(200):  # what it left behind; one that is ended may just have started another
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        for left in descendants():
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
        time.sleep(0.005)
    tell(code=os.waitstatus_to_exitcode(status))


def may_run(place: str, user: int) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            become(user)
            os._exit(0 if os.access(place, os.X_OK) else 1)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def descendants() -> list[int]:
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    found, fresh = set(), {os.getpid()}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return sorted(found)


def main() -> None:
    die_with_parent()
    os.umask(0o022)
    with os.fdopen(ORDER, encoding="utf-8") as file:
        order = json.load(file)
    (run_in_namespaces if order["mode"] == "namespaces" else run_with_limits)(order)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
