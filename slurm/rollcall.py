"""Nodes of one job find each other before torchrun starts; launch.sh runs this on each node.

torchrun alone would wait in silence, name nobody who is missing, take another job's port for its
own and need names that resolve. The head node listens on the first free port of 16; the others
look for it there. Once all have come, each prints what its torchrun needs, on one line:

    is_host endpoint rendezvous-id local-address interface

The port is then torchrun's. The standard library only, as torch takes seconds to import.
"""

import argparse
import array
import contextlib
import fcntl
import os
import signal
import socket
import struct
import sys
import time
from typing import NoReturn

PORTS = 16


def fail(message) -> NoReturn:
    sys.exit(f"launch.sh: {message}")


def plain(address):
    """The address of a peer of a dual-stack socket, as IPv4 knows it."""
    return address[0].removeprefix("::ffff:").partition("%")[0]


def is_local(host):
    """Whether host is this machine: only an address of one's own can be bound."""
    for family, *_, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(address)
            return True
    return False


def interface_of(address):
    """The network interface that has this IPv4 address, or - where none is known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        buffer = array.array("B", bytes(64 * 1024))
        request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
        length = struct.unpack("iP", fcntl.ioctl(probe, 0x8912, request))[0]  # SIOCGIFCONF
    for at in range(0, length, 40):
        name, ip = struct.unpack("16s4x4s", buffer[at : at + 24].tobytes())
        if socket.inet_ntoa(ip) == address:
            return name.split(b"\0")[0].decode().partition(":")[0]
    return "-"


def listen(first):
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    for port in range(first, first + PORTS):
        with contextlib.suppress(OSError):
            return port, socket.create_server(
                ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024
            )
    fail(f"ports {first} to {first + PORTS - 1} of this node are all taken")


def call(args, deadline):
    """The head node: wait until all the others have come, then tell them to go."""
    port, server = listen(args.port)
    came = {}  # node -> its connection; a node that comes again replaces its former self
    try:
        while len(came) < args.nnodes - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            connection, peer = server.accept()
            connection.settimeout(2)
            with contextlib.suppress(OSError, ValueError):
                word, job, node = connection.recv(4096).decode().split()
                if word == "here" and job == args.job:
                    connection.sendall(f"welcome {job}\n".encode())
                    came[node if args.nodes else f"{node} ({plain(peer)})"] = connection
    except TimeoutError:
        missing = [node for node in args.nodes if node not in (args.node, *came)]
        count = args.nnodes - 1 - len(came)
        message = (
            f"{count} of {args.nnodes} nodes did not come to port {port} within {args.wait} s: "
            f"missing {', '.join(missing) or f'{count} node' + 's' * (count > 1)}; "
            f"here: {', '.join([args.node, *came])}"
        )
        for connection in came.values():
            with contextlib.suppress(OSError):
                connection.sendall(f"failed {message}\n".encode())
        fail(message)
    job = args.job if args.nodes else f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    # How the others reach this node tells its address; its own name may say 127.0.1.1.
    address = plain(next(iter(came.values())).getsockname())
    for connection in came.values():
        with contextlib.suppress(OSError):
            connection.sendall(f"go {job}\n".encode())
    for connection in came.values():
        with contextlib.suppress(OSError):
            connection.recv(1)  # the other end closes first, so that the port is free at once
    return 1, f"{address}:{port}", job, address


def find_head(args, deadline):
    """Any other node: a connection to the head, which has said welcome on one of its ports."""
    while time.monotonic() < deadline:
        for port in range(args.port, args.port + PORTS):
            try:
                connection = socket.create_connection((args.head, port), timeout=2)
            except ConnectionRefusedError:
                continue
            except socket.gaierror:
                fail(f"the head node's name {args.head} does not resolve here; give its address")
            except OSError:
                break  # no way to this host yet: other ports would not answer either
            with contextlib.suppress(OSError):  # something else may listen there, and be silent
                connection.sendall(f"here {args.job} {args.node}\n".encode())
                lines = connection.makefile("r", errors="replace")
                if lines.readline() == f"welcome {args.job}\n":
                    return connection, lines
            connection.close()
        time.sleep(0.2)
    fail(
        f"no answer from the head node {args.head}, ports {args.port} to {args.port + PORTS - 1}, "
        f"within {args.wait} s: missing {args.nodes[0] if args.nodes else args.head}"
    )


def answer(args, deadline):
    """Any other node: tell the head who is here and wait for its word."""
    connection, lines = find_head(args, deadline)
    # The head gives up after as long a wait as ours, which may have begun later.
    connection.settimeout(args.wait + 5)
    try:
        word, _, rest = lines.readline().strip().partition(" ")
    except OSError:
        word = ""
    if word != "go":
        fail(rest if word == "failed" else f"the head node {args.head} went away before all nodes had come")
    endpoint = f"{plain(connection.getpeername())}:{connection.getpeername()[1]}"
    return 0, endpoint, rest, plain(connection.getsockname())


def main():
    # Ends at a signal without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True)
    parser.add_argument("--nnodes", type=int, required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--wait", type=int, required=True)
    parser.add_argument("--node", required=True, help="the name of this node")
    parser.add_argument("--nodes", type=lambda text: text.split(","), default=[])
    parser.add_argument("--index", type=int, help="0 on the head node, which else is known by its address")
    args = parser.parse_args()
    deadline = time.monotonic() + args.wait
    try:
        at_head = args.index == 0 if args.index is not None else is_local(args.head)
    except socket.gaierror:
        at_head = False
    is_host, endpoint, job, address = (call if at_head else answer)(args, deadline)
    print(is_host, endpoint, job, address, interface_of(address))


if __name__ == "__main__":
    main()
