"""Sandboxes for code that a model wrote; `choose.choose_sandbox` picks one that works on this machine.

    bubblewrap    namespaces by `bwrap`, and a seccomp filter     best; needs the program and user namespaces
    webassembly   a CPython in wasmtime                           extra `sandbox`; slower, without threads
    landlock      Landlock and a seccomp filter                   Linux 6.2; outside paths are visible
    none          limits of time and memory                       only if asked for

In the first three a program cannot start another process. So its memory limit bounds its total use, and
nothing remains after it is killed. It can write no file, so it cannot fill a disk.
"""
