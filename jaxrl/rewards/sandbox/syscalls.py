"""The seccomp filter of the native sandboxes: a list of the system calls that a computing Python needs.

All others fail with ENOSYS, which is what an old kernel would say, so that libraries try another way.
Not in the list, among others: new processes (fork, vfork, clone without CLONE_THREAD), execve, sockets,
signals to processes, ptrace, process_vm_*, everything that changes files or their metadata, memory outside
the address space (memfd_create, shmget), namespaces, mounts, bpf, io_uring, keyrings.
"""

from __future__ import annotations

import errno
import functools
import tempfile

from jaxrl.rewards.sandbox.sandbox_interface import SandboxUnavailable

_ALLOWED = """
read readv pread64 preadv preadv2 write writev pwrite64 pwritev lseek close close_range dup dup2 dup3
open openat access faccessat faccessat2 stat fstat lstat newfstatat statx statfs fstatfs readlink readlinkat
getcwd chdir fchdir getdents getdents64 pipe pipe2
mmap munmap mremap mprotect madvise brk membarrier
futex futex_wait futex_wake futex_requeue futex_waitv get_robust_list set_robust_list rseq set_tid_address
exit exit_group
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack pause
restart_syscall
getpid getppid gettid getuid geteuid getgid getegid getgroups getresuid getresgid getpgrp
uname sysinfo getrusage getrlimit times time gettimeofday clock_gettime clock_getres
clock_nanosleep nanosleep alarm getitimer setitimer getrandom umask
poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
eventfd eventfd2
sched_yield sched_getaffinity sched_getparam sched_getscheduler getcpu
recvfrom shutdown getsockname getpeername getsockopt
""".split()  # noqa: SIM905

_CLONE_THREAD = 0x10000
_NEW_NAMESPACES = 0x7E020000
_F_DUPFD, _F_SETFL, _F_DUPFD_CLOEXEC = 0, 4, 1030
# Duplicate; flags of descriptors and files. Not among them: the owner of a file, who gets signals.
_FCNTL = (*range(_F_DUPFD, _F_SETFL + 1), _F_DUPFD_CLOEXEC)
# isatty, close-on-exec, non-blocking, bytes to read, size of the window.
_IOCTL = (0x5401, 0x5450, 0x5451, 0x5421, 0x541B, 0x5413)
# Names of threads and of memory.
_PRCTL = (15, 16, 0x53564D41)
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPES = 1, 1, 0xF


@functools.cache
def syscall_filter() -> bytes:
    """The compiled filter, for the architecture of this machine.

    Raises:
      SandboxUnavailable: pyseccomp or the library below it is not installed.
    """
    try:
        import pyseccomp as seccomp
    except (ImportError, RuntimeError) as error:
        raise SandboxUnavailable(
            f"libseccomp cannot be loaded ({error}); install it (Debian, Ubuntu: "
            "apt install libseccomp2) and pip install pyseccomp"
        ) from error
    filter_ = seccomp.SyscallFilter(seccomp.ERRNO(errno.ENOSYS))
    equal, masked = seccomp.EQ, seccomp.MASKED_EQ

    def allow(name: str, *arguments: tuple[int, int, int, int]) -> None:
        try:
            number = seccomp.resolve_syscall(seccomp.Arch.NATIVE, name)
        except ValueError:
            # A call that is newer than this libseccomp, or another architecture's.
            return
        filter_.add_rule(seccomp.ALLOW, number, *(seccomp.Arg(*a) for a in arguments))

    for name in _ALLOWED:
        allow(name)
    allow("clone", (0, masked, _CLONE_THREAD | _NEW_NAMESPACES, _CLONE_THREAD))
    for name, position, values in (
        ("fcntl", 1, _FCNTL),
        ("ioctl", 1, _IOCTL),
        ("prctl", 0, _PRCTL),
    ):
        for value in values:
            allow(name, (position, equal, value, 0))
    # Reading its own limits; raising them is a right of root.
    allow("prlimit64", (0, equal, 0, 0), (2, equal, 0, 0))
    # asyncio wakes itself up through a pair of sockets. An address would lead out of the pair.
    allow("socketpair", (0, equal, _AF_UNIX, 0), (1, masked, _SOCK_TYPES, _SOCK_STREAM))
    allow("sendto", (4, equal, 0, 0))
    with tempfile.TemporaryFile() as file:
        filter_.export_bpf(file)
        file.seek(0)
        return file.read()
