"""Protocol version 1 and its optional features, without a socket, a thread or a clock.

``arrays`` (one array) and ``codec`` (bytes and values) are below ``observation`` and ``messages`` (values and
messages), which are below ``session`` (who may send what when). ``learned`` and ``learned_writer`` are fast paths
past the general parser and encoder. ``reuse``, ``info`` and ``closing`` hold what both ends must agree on.
Callers: ``server.hub`` and ``client``.
"""

__all__: list[str] = []
