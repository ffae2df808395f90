"""A task whose reward tries the harm that the response names, so that the sandbox itself is what it meets."""

import asyncio
import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import signal
import socket
import subprocess
import tempfile
import threading
from pathlib import Path

from paceline.rl.tasks import Prompt

LIBC = ctypes.CDLL(None, use_errno=True)
#: Shared with the worker, as an engine's memory for weights would be, and an open file that can be written.
SHARED = mmap.mmap(-1, 4096)
SHARED[:4] = b"kept"


def system_call(number, *arguments):
    result = LIBC.syscall(ctypes.c_long(number), *(ctypes.c_long(argument) for argument in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def write_shared():
    SHARED[:4] = b"lost"
    raise PermissionError("what was written stays in the worker")


def own_signals(descriptor):
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getppid())


def fill_folder():
    for number in range(10**6):
        Path(tempfile.gettempdir(), f"{number}").write_bytes(bytes(1 << 16))


def fake_reply(text):
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, text)
    signal.pause()


class Harmful:
    """``responses`` of its harms are code of this file alone; ``folder`` is where files must not appear."""

    def __init__(self, folder, environ_name="SECRET_OF_THE_RUN"):
        self.folder, self.parent = Path(folder), os.getpid()
        self.kept = (self.folder / "kept").open("w+")
        self.descriptor, self.secret = self.kept.fileno(), environ_name

    def prompts(self, split):
        return [Prompt(prompt_id=0, text="harm")] if split == "train" else []

    def answer(self, prompt):
        raise NotImplementedError

    def reward(self, prompt, response):
        getattr(self, response)()
        return 1.0

    def fine(self):
        """Do what a reward may: compute, import, use threads and the scratch folder."""
        import decimal

        found = []
        thread = threading.Thread(target=lambda: found.append(decimal.Decimal(1)))
        thread.start()
        thread.join()
        asyncio.run(asyncio.sleep(0))
        assert found
        assert os.getcwd() == os.path.realpath(tempfile.gettempdir())

    def scratch(self):
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"x" * 1000)
        Path("mine").write_text("here")

    def make_file(self):
        (self.folder / "evil").write_text("x")

    def make_folder(self):
        (self.folder / "evil").mkdir()

    def remove(self):
        (self.folder / "kept").unlink()

    def rename(self):
        (self.folder / "kept").rename(self.folder / "evil")

    def truncate(self):
        os.truncate(self.folder / "kept", 0)

    def link(self):
        (self.folder / "evil").symlink_to("kept")

    def change_mode(self):
        (self.folder / "kept").chmod(0o777)

    def change_times(self):
        os.utime(self.folder / "kept", (0, 0))

    def inherited_file(self):
        os.write(self.descriptor, b"evil")

    def inherited_by_name(self):
        Path(f"/proc/{self.parent}/fd/{self.descriptor}").write_text("evil")

    def shared_memory(self):
        write_shared()

    def network(self):
        socket.create_connection(("127.0.0.1", 9), timeout=1)

    def datagrams(self):
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9))

    def local_socket(self):
        socket.socket(socket.AF_UNIX).bind("\0evil")

    def datagram_pair(self):
        socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)

    def fork(self):
        if os.fork() == 0:
            os._exit(0)

    def shell(self):
        if os.system(f"touch {self.folder / 'evil'}") != 0:  # noqa: S605  it must not start
            raise PermissionError("the shell did not start")

    def program(self):
        subprocess.run(["touch", self.folder / "evil"], check=True)

    def execute(self):
        os.execv("/bin/true", ["true"])

    def kill_parent(self):
        os.kill(self.parent, signal.SIGCONT)

    def kill_group(self):
        os.killpg(os.getpgid(self.parent), signal.SIGCONT)

    def kill_all(self):
        os.kill(-1, signal.SIGCONT)

    def descriptor_signals(self):
        reading, _ = os.pipe()
        own_signals(reading)

    def parents_environment(self):
        if self.secret in Path(f"/proc/{self.parent}/environ").read_text():
            return

    def own_environment(self):
        if self.secret not in os.environ and self.secret not in Path("/proc/self/environ").read_text():
            raise PermissionError("there is nothing in it")

    def parents_memory(self):
        with open(f"/proc/{self.parent}/mem", "r+b") as memory:
            memory.seek(id(self))
            memory.write(b"evil")

    def trace_parent(self):
        if LIBC.ptrace(16, self.parent, 0, 0) != 0:  # PTRACE_ATTACH
            raise OSError(ctypes.get_errno(), "ptrace")

    def parents_limits(self):
        resource.prlimit(self.parent, resource.RLIMIT_CORE, (0, 0))

    def parents_priority(self):
        os.setpriority(os.PRIO_PROCESS, self.parent, os.getpriority(os.PRIO_PROCESS, self.parent))

    def outlive_parent(self):
        if LIBC.prctl(1, 0, 0, 0, 0) != 0:  # PR_SET_PDEATHSIG
            raise OSError(ctypes.get_errno(), "prctl")

    def namespaces(self):
        if LIBC.unshare(0x10000000) != 0:  # CLONE_NEWUSER
            raise OSError(ctypes.get_errno(), "unshare")

    def anonymous_file(self):
        os.memfd_create("evil")

    def io_uring(self):
        system_call(425, 1, 0)

    def process_descriptor(self):
        os.pidfd_open(self.parent)

    def terminal(self):
        os.close(os.open("/dev/tty", os.O_RDWR))

    def memory_bomb(self):
        bytearray(1 << 33)

    def memory_in_steps(self):
        taken = []
        while True:
            taken.append(mmap.mmap(-1, 1 << 26))

    def large_file(self):
        with open("large", "wb") as file:
            for _ in range(64):
                file.write(bytes(1 << 20))

    def many_files(self):
        fill_folder()

    def endless(self):
        while True:
            pass

    def exit(self):
        os._exit(0)

    def stop_itself(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def crash(self):
        ctypes.string_at(1)

    def close_everything(self):
        os.closerange(0, 128)

    def half_a_reply(self):
        fake_reply(b"\x05")

    def long_reply(self):
        fake_reply(b"\xff\xff\xff\x7f" + bytes(4000))

    def no_reply(self):
        fake_reply(b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1")

    def rich_reply(self):
        fake_reply(b"\x0b\x00\x00\x00\x92\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00\xc0")

    def escapes(self):
        raise ValueError("\x1b[2J\x1b]0;title\x07")


#: What must fail with an error of the system where the whole sandbox is there.
REFUSED = (
    *("make_file", "make_folder", "remove", "rename", "truncate", "link", "change_mode", "change_times"),
    *("inherited_file", "inherited_by_name", "shared_memory", "network", "datagrams", "local_socket", "datagram_pair"),
    *("fork", "shell", "program", "execute", "kill_parent", "kill_group", "kill_all", "descriptor_signals"),
    *("parents_environment", "own_environment", "parents_memory", "trace_parent", "parents_limits"),
    *("parents_priority", "outlive_parent", "namespaces", "anonymous_file", "io_uring", "process_descriptor"),
    *("terminal", "large_file"),
)
#: Harms that cost the worker its life or its time, and the error that says so.
ENDED = {
    "many_files": "SandboxError: the reward wrote more than",
    "endless": "TimeoutError: the reward took longer",
    "exit": "the reward's process ended with exit status 0",
    "stop_itself": "TimeoutError",
    "crash": "the reward's process ended with SIGSEGV",
    "close_everything": "the reward's process ended",
    "half_a_reply": "TimeoutError",
    "long_reply": "SandboxError: the reward's process sent what is no reward",
    "no_reply": "SandboxError: the reward's process sent what is no reward",
    "rich_reply": "SandboxError: the reward's process sent what is no reward",
}
