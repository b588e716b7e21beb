"""Protocol version 1 and its optional features, without a socket, a thread or a clock.

``arrays`` (one array) and ``codec`` (bytes and values) are below ``observation`` and ``messages`` (values and
messages), which are below ``session`` (who may send what when). ``reuse`` and ``info`` hold two rules that both ends
share. Callers: ``server.hub`` and ``client``.
"""

__all__: list[str] = []
