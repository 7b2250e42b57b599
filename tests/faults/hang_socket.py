"""Rank 1 waits for an answer from a server that accepts and says nothing."""

import socket

from moment import fault, guilty
from training import steps

for step in steps():
    if guilty(step):
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as asked:
            asked.sendall(b"GET /samples HTTP/1.0\r\n\r\n")
            fault()
            asked.recv(4096)
