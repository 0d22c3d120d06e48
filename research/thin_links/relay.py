"""Delay TCP connections, and measure a path: run inside a network namespace, ends with stdin.

    python relay.py relay HERE THERE SECONDS PORT...  # HERE:PORT to THERE:PORT, delayed
    python relay.py serve ADDRESS PORT              # the other end of a measurement
    python relay.py measure ADDRESS PORT UP DOWN AT # transfer bytes, not before the time AT

The relay holds every piece of data for SECONDS in each direction, and what comes first on a
connection for two times longer, as TCP's handshake would. So every request and reply takes the
delay of a long path. TCP itself sees only the short path on either side of the relay: its slow
start and its recovery from losses take no longer than without the delay.
"""

import asyncio
import contextlib
import json
import os
import socket
import statistics
import struct
import sys
import threading
import time

PIECE = 1 << 18  # bytes
HELD = 64  # pieces in the relay, for each connection and direction
PINGS = 20


async def relay(here: str, there: str, delay: float, ports: list[int]) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = writer.get_extra_info("sockname")[1]
        try:
            back, onward = await asyncio.open_connection(there, port, limit=PIECE)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            pipe(reader, onward, delay, first=3 * delay), pipe(back, writer, delay, first=delay)
        )

    for port in ports:
        await asyncio.start_server(connected, here, port, limit=PIECE)
    print("ready", flush=True)
    await asyncio.Event().wait()


async def pipe(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float, first: float
) -> None:
    """Copy one direction of a connection."""
    held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(HELD)
    now = asyncio.get_running_loop().time

    async def take() -> None:
        data, wait = b"?", first
        while data:
            try:
                data = await reader.read(PIECE)
            except OSError:  # the connection was reset
                data = b""
            await held.put((now() + wait, data))
            wait = delay

    taking = asyncio.create_task(take())
    with contextlib.suppress(OSError):
        due, data = await held.get()
        while data:
            await asyncio.sleep(due - now())
            writer.write(data)
            await writer.drain()
            due, data = await held.get()
    taking.cancel()
    writer.close()


def serve(address: str, port: int) -> None:
    with socket.create_server((address, port)) as server:
        print("ready", flush=True)
        while True:
            threading.Thread(target=answer, args=server.accept()[:1], daemon=True).start()


def answer(connection: socket.socket) -> None:
    """Receive, then send, as many bytes as each request says; a request is two numbers."""
    with connection:
        while request := receive(connection, 16, keep=True):
            up, down = struct.unpack("!QQ", request)
            receive(connection, up)
            connection.sendall(bytes(max(down, 1)))


def receive(connection: socket.socket, size: int, *, keep: bool = False) -> bytes:
    """Receive ``size`` bytes; return them if they are to be kept."""
    kept = b""
    while size and (data := connection.recv(min(size, PIECE))):
        size -= len(data)
        kept += data if keep else b""
    return kept


def measure(address: str, port: int, up: int, down: int, at: float) -> None:
    """Print the round trip, and when the transfer began and ended, without one round trip."""
    with socket.create_connection((address, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def exchange(up: int, down: int) -> float:
            began = time.time()
            connection.sendall(struct.pack("!QQ", up, down))
            connection.sendall(bytes(up))
            receive(connection, max(down, 1))
            return time.time() - began

        exchange(0, 0)
        round_trip = statistics.median(exchange(0, 0) for _ in range(PINGS))
        time.sleep(max(0.0, at - time.time()))
        began = time.time()
        exchange(up, down)
        ended = time.time() - round_trip
    print(json.dumps({"round_trip": round_trip, "began": began, "ended": ended}))


def end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_stdin, daemon=True).start()
    what, address, *words = sys.argv[1:]
    if what == "relay":
        there, delay, *ports = words
        asyncio.run(relay(address, there, float(delay), [int(port) for port in ports]))
    elif what == "serve":
        serve(address, int(words[0]))
    else:
        port, up, down = map(int, words[:3])
        measure(address, port, up, down, float(words[3]))
