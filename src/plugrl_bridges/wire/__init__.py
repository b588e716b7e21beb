"""Protocol version 1 and its optional features, without a socket, a thread or a clock.

``codec`` (bytes and values) is below ``messages`` (values and messages), which is below ``session`` (who may send what
when). ``reuse`` and ``info`` hold two rules that both ends share. Callers: ``server.hub`` and ``client``.
"""
