"""One WebSocket connection on a plain socket, either end, driven entirely by the thread that calls it.

Here it is decided when bytes move; ``stream`` moves them, ``engine`` knows what they mean. This module must not know
what a message says, who else is connected, or what time it is beyond the timeouts it is given. Make a connection
with ``connect`` or ``Listener.accept``; its messages go on to ``wire``.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from websockets.exceptions import ProtocolError
from websockets.frames import Close
from websockets.server import ServerProtocol

from .engine import Engine, State
from .outgoing import Buffer, MaskedWriter, gather
from .patience import Patience, yield_processor
from .stream import Stream

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from websockets.client import ClientProtocol
    from websockets.http11 import Request, Response

    from plugrl_bridges.errors import ConnectionClosed

__all__ = ["WebSocket"]

logger = logging.getLogger(__name__)

_READ_BYTES_PER_PUMP = 1 << 23
_REASON_BYTES = 123
_ASK_EVERY_S = 0.1


class WebSocket:
    """One WebSocket connection, which sends and receives messages.

    The socket is non-blocking; every method does its input and output in the calling thread. Not thread safe:
    callers that share a connection hold a lock. Nothing that the peer does raises from `pump`, `pop`, `recycle`,
    `ping`, `close`, `finish` or `abort`.

    Args:
        sock: A connected, non-blocking socket, plain or TLS-wrapped (handshake not done); owned from here on.
        core: The I/O-free core of the right side, not used yet (server) or with the request queued (client).
        address: The peer, for messages: ``host:port`` of a client, the URL of a server.
        max_message_bytes: The largest payload accepted; a larger one ends the connection with close code 1009.
        answer: Server side: what to respond to a handshake request.
    """

    def __init__(
        self,
        sock: socket.socket,
        core: ServerProtocol | ClientProtocol,
        *,
        address: str,
        max_message_bytes: int,
        answer: Callable[[Request], Response] | None = None,
    ) -> None:
        self.address = address
        """The peer: ``host:port`` of a client, the URL of a server."""
        self.pings_unanswered = 0
        """Pings sent since anything at all was received."""
        self.bytes_received = 0
        self.bytes_sent = 0
        self._server = isinstance(core, ServerProtocol)
        self._stream = Stream(sock)
        self._patience = Patience()
        self._since = time.monotonic()
        self._writer = None if self._server else MaskedWriter()
        self._sending = False
        self._engine = Engine(core, address, max_message_bytes, answer)
        self._queue = self._engine.queue
        self._inbox = self._engine.inbox

    def __repr__(self) -> str:
        return f"<WebSocket {'from' if self._server else 'to'} {self.address}, {self.state.value}>"

    @property
    def state(self) -> State:
        """Where the connection is in its life."""
        return self._engine.state

    @property
    def closed(self) -> bool:
        """Whether the socket is gone."""
        return self._engine.state is State.CLOSED

    @property
    def close_code(self) -> int | None:
        """The peer's close code: 1005 if its close frame had none, 1006 if none came; None while it may come."""
        return self._engine.close_code

    @property
    def close_reason(self) -> str:
        """The reason in the peer's close frame."""
        return self._engine.close_reason

    @property
    def close_detail(self) -> str:
        """What else is known of the end: the system's error text, or what the peer did wrong."""
        return self._engine.close_detail

    @property
    def handshake_error(self) -> Exception | None:
        """What was wrong with the TLS or HTTP handshake, if anything; an exception of the library below."""
        return self._stream.tls_error or self._engine.handshake_error

    @property
    def tls_error(self) -> OSError | None:
        """Why the TLS handshake failed, if it did."""
        return self._stream.tls_error

    @property
    def wants_write(self) -> bool:
        """Whether `pump` has something to send that the socket did not take; a selector may wait for that too."""
        return bool(self._engine.pending) or self._stream.wants_write

    def fileno(self) -> int:
        """Return the file descriptor for a selector, or -1 once closed."""
        return self._stream.fileno()

    def pump(self) -> bool:
        """Read what the socket has now, without blocking; parse it, answer control frames, go on with a handshake.

        It stops when the socket is empty, 16 whole messages are queued, or some MiB were read. It never raises for
        what the peer does: a peer that breaks the rules is sent the close code of RFC 6455, section 7.4.1.

        Returns:
            True if anything was read or the state changed.
        """
        state, received = self._engine.state, self.bytes_received
        if state is State.CLOSED:
            return False
        try:
            if not self._stream.handshake_due or self._shake_hands():
                self._read()
        except OSError as exc:
            self._lost(exc.strerror or str(exc))
        return self.bytes_received != received or self._engine.state is not state

    def pop(self) -> memoryview | str | None:
        """Return the next whole message, and remove it from the queue.

        Returns:
            A view of a binary message, valid until `recycle`; the str of a text message; None if there is none.
            Messages that came before a close are still delivered.
        """
        if not self._queue and self._engine.stalled:
            # Bytes that were read already would wake no selector.
            self.pump()
        return self._queue.popleft() if self._queue else None

    def recycle(self) -> None:
        """Release every view that `pop` or `receive` returned; their memory is used again.

        While messages are queued the memory stays as it is. A caller that never recycles loses speed, not data.
        """
        if not self._queue:
            self._inbox.recycle()

    def receive(self, timeout_s: float | None) -> memoryview | str | None:
        """Wait for a message.

        Args:
            timeout_s: Seconds; 0 looks without waiting, None waits for ever.

        Returns:
            A message as from `pop`, or None if none came in time.

        Raises:
            ConnectionClosed: No message is queued and none will come.
        """
        if not self._queue:
            self.pump()
        if self._queue:
            return self._queue.popleft()
        if timeout_s is not None and timeout_s <= 0:
            self._raise_if_over()
            return None
        started = time.perf_counter()
        try:
            self._look(started + self._patience.budget_s())
            return self._sleep_for(None if timeout_s is None else started + timeout_s)
        finally:
            self._patience.learn(time.perf_counter() - started)

    def _raise_if_over(self) -> None:
        if self._engine.state is not State.OPEN and self._engine.state is not State.CONNECTING:
            raise self._engine.closed_error()

    def _look(self, until: float) -> None:
        """Look for a message without sleeping, until one is there or the time is over."""
        while not self._queue and time.perf_counter() < until:
            yield_processor()
            self.pump()

    def _sleep_for(self, deadline: float | None) -> memoryview | str | None:
        while True:
            if self._queue:
                return self._queue.popleft()
            self._raise_if_over()
            remaining = None
            if deadline is not None:
                remaining = deadline - time.perf_counter()
                if remaining <= 0:
                    return None
            if self.wants_write:
                self._stream.wait.either(read=True, write=True, timeout_s=remaining)
            else:
                self._stream.wait.readable(remaining)
            self.pump()

    def send(
        self, *messages: Sequence[Buffer], timeout_s: float = 60.0, stopping: Callable[[], bool] | None = None
    ) -> None:
        """Send whole binary messages, all in one system call where the kernel takes them.

        While the peer is slow to read, what it sends is read and queued, so two big senders cannot block each other.

        Args:
            messages: Each is a sequence of C-contiguous buffers that together are one payload.
            timeout_s: Seconds for the peer to take everything.
            stopping: Asked ten times a second while the peer does not read; True ends the send as the timeout would.

        Raises:
            ConnectionClosed: The connection is not open, failed, or the peer did not take the bytes in time. In the
                last two cases it is closed at once, without a close frame: that could only go behind a whole frame.
            TypeError: A part is no C-contiguous buffer; nothing was sent.
        """
        if self._engine.state is not State.OPEN:
            raise self._engine.closed_error()
        # Everything is framed before anything is sent, so a buffer that is none leaves the connection as it was.
        buffers, total = gather(messages) if self._writer is None else self._writer.gather(messages)
        pending = self._engine.pending
        if pending:
            buffers.insert(0, bytes(pending))
            total += len(pending)
            pending.clear()
        buffers = self._stream.joined(buffers)
        count = self._send_some(buffers)
        if count < total:
            self._send_rest(buffers, count, timeout_s, stopping)

    def ping(self) -> None:
        """Send a ping; it counts in `pings_unanswered` until anything is received. Nothing is done unless open."""
        if self._engine.state is State.OPEN:
            self.pings_unanswered += 1
            self._engine.ping()
            self._flush()

    def close(self, code: int, reason: str = "") -> None:
        """Start the closing handshake: send the close frame and do not wait. `finish` waits.

        A handshake that is not done is aborted; a connection that is closing or closed is left alone.

        Args:
            code: A close code that may be sent (RFC 6455, section 7.4).
            reason: At most 123 bytes of UTF-8; more is cut off.

        Raises:
            ValueError: The code must not be sent.
        """
        reason = reason.encode()[:_REASON_BYTES].decode(errors="ignore")
        try:
            Close(code, reason).serialize()
        except ProtocolError as exc:
            raise ValueError(f"code must be a WebSocket close code that may be sent, not {code!r}") from exc
        if self._engine.state is State.CONNECTING:
            self._lost("closed by this side before the handshake was done")
        elif self._engine.state is State.OPEN:
            self._engine.close(code, reason)
            self._flush()

    def finish(self, timeout_s: float) -> None:
        """Wait for the peer to end the connection, then shut the socket; `close` with 1000 first if that is not done.

        Args:
            timeout_s: Seconds to wait at most; the socket is shut then in any case.
        """
        if self._engine.state is State.OPEN:
            self.close(1000)
        deadline = time.monotonic() + timeout_s
        while self._engine.state is State.CLOSING:
            self.pump()
            remaining = deadline - time.monotonic()
            if remaining <= 0 or self.closed:
                break
            self._stream.wait.either(read=True, write=self.wants_write, timeout_s=remaining)
        self.abort()

    def abort(self) -> None:
        """Shut the socket now, without a close frame. Idempotent."""
        self._lost("aborted by this side")

    def _shake_hands(self) -> bool:
        """Go on with the TLS handshake; True if it is done."""
        done = self._stream.shake_hands()
        if self._stream.tls_error is not None:
            detail = f"TLS handshake failed: {self._stream.tls_error}"
            if self._server:
                logger.warning("connection from %s: %s", self.address, detail)
            self._lost(detail)
        return done

    def _read(self) -> None:
        """Receive and parse until the socket is empty or enough was read."""
        engine, inbox, stream = self._engine, self._inbox, self._stream
        if engine.pending:
            self._flush()
        if engine.stalled:
            engine.parse(time.monotonic() - self._since)
            self._settle()
        budget = _READ_BYTES_PER_PUMP
        while not engine.stalled and engine.state is not State.CLOSED:
            space = inbox.target()
            count = stream.receive(space)
            if count < 0:
                return
            if count == 0:
                detail = engine.end_of_stream()
                if self._server and engine.state is State.CONNECTING and self.bytes_received:
                    logger.warning("connection from %s: %s", self.address, detail)
                self._lost(detail)
                return
            inbox.end += count
            self.bytes_received += count
            self.pings_unanswered = 0
            engine.parse(time.monotonic() - self._since)
            if engine.pending or engine.end_pending or engine.over:
                self._settle()
            budget -= count
            if not stream.may_hold_more(full=count == len(space), enough=budget <= 0):
                return

    def _settle(self) -> None:
        """Send what the engine has queued, and shut the socket if it says so."""
        self._flush()
        if self._engine.over:
            if self._server and self._engine.state is State.CONNECTING:
                logger.warning("connection from %s: %s", self.address, self._engine.over)
            self._lost(self._engine.over)

    def _flush(self) -> None:
        """Send pending control bytes and the end of the stream, as far as the socket takes them; never in mid-frame."""
        if self._sending:
            return
        engine = self._engine
        pending = engine.pending
        try:
            while pending:
                count = self._stream.send([pending])
                if not count:
                    return
                self.bytes_sent += count
                del pending[:count]
            if engine.end_pending:
                engine.end_pending = False
                # RFC 6455, section 7.1.1: the server ends the stream first, and waits for the client.
                self._stream.end()
        except OSError as exc:
            # The peer is gone, but what it sent before it went is still to be read; reading meets the end.
            logger.debug("%s takes no more bytes: %s", self.address, exc)
            pending.clear()

    def _send_some(self, buffers: Sequence[Buffer]) -> int:
        """Send what the socket takes now, 0 if it is full."""
        try:
            count = self._stream.send(buffers)
        except OSError as exc:
            raise self._send_failure(exc) from exc
        self.bytes_sent += count
        return count

    def _send_rest(
        self, buffers: Sequence[Buffer], done: int, timeout_s: float, stopping: Callable[[], bool] | None
    ) -> None:
        """Send what is behind the first `done` bytes, reading meanwhile."""
        views = deque(memoryview(buffer) for buffer in buffers)
        started = time.monotonic()
        self._sending = True
        try:
            while True:
                while views and done >= len(views[0]):
                    done -= len(views.popleft())
                if not views:
                    break
                views[0] = views[0][done:]
                done = self._send_some(list(views))
                if not done:
                    waited_s = time.monotonic() - started
                    if waited_s >= timeout_s or (stopping is not None and stopping()):
                        self._lost(f"peer did not take {sum(map(len, views))} bytes in {waited_s:.1f} s")
                        raise self._engine.closed_error()
                    self._wait_to_send(timeout_s - waited_s if stopping is None else _ASK_EVERY_S)
        except BaseException:
            self.abort()
            raise
        finally:
            self._sending = False
        self._settle()

    def _wait_to_send(self, timeout_s: float) -> None:
        """Wait for room in the socket, and read what comes meanwhile."""
        # A stalled connection reads nothing: waiting for it to be readable would spin.
        readable, _ = self._stream.wait.either(read=not self._engine.stalled, write=True, timeout_s=timeout_s)
        if readable:
            self.pump()
            if self._engine.state is not State.OPEN:
                raise self._engine.closed_error()

    def _send_failure(self, exc: OSError) -> ConnectionClosed:
        """Read what the peer sent before the failure, a close frame perhaps, and return the error to raise."""
        self._sending = True
        while self.pump() and not self._engine.stalled:
            pass
        self._sending = False
        self._lost(exc.strerror or str(exc))
        return self._engine.closed_error()

    def _lost(self, detail: str) -> None:
        """Shut the socket; what was known about the end before stays."""
        if self._engine.state is not State.CLOSED:
            self._engine.lose(detail)
            self._stream.close()
