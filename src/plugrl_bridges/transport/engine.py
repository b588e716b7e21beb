"""What bytes mean: received bytes become messages and control answers, without any input or output.

The websockets library's own core does the handshake, control frames, fragments and the closing handshake. Whole
unfragmented binary frames, which are all that the PlugRL protocol sends [1], take a short lane of our own: they are
cut out of the receive buffer where they lie. Everything else is handed to the core, frame by frame, in order.
This module must not know of sockets, timeouts or threads; ``websocket`` moves the bytes.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State as CoreState
from websockets.server import ServerProtocol

from plugrl_bridges.errors import ConnectionClosed

from .frames import BINARY_FINAL, CONTROL_BIT, MASK_BIT, check_header, mask_in_place, parse_header
from .inbox import Inbox

__all__ = ["CORE_LOGGER", "Engine", "State"]

logger = logging.getLogger(__name__)

_QUEUED_MESSAGES = 16
"""Parsing stops with this many whole messages queued: the protocol alternates, so an honest peer has two at most."""
_PENDING_BYTES = 1 << 20
_SMALL_FRAMES_PER_PARSE = 256
"""Parsing stops after this many control frames and crumbs of messages: each is left to the core."""
_CRUMB_BYTES = 1 << 10
_SMALL_FRAMES = 512
"""A peer may send so many of them without a message between, and more as time goes by; then it is a flood."""
_SMALL_FRAMES_PER_S = 20
_LARGE_FRAME_BYTES = 1 << 20
_REASON_BYTES = 123
_END_OF_HEAD = b"\r\n\r\n"


class State(enum.Enum):
    """Where a connection is in its life."""

    CONNECTING = "connecting"
    """The TLS or HTTP handshake is not done."""
    OPEN = "open"
    CLOSING = "closing"
    """A close frame was sent or received, or the peer broke the rules; no message is sent or received any more."""
    CLOSED = "closed"
    """The socket is gone."""


_STATES = {
    CoreState.CONNECTING: State.CONNECTING,
    CoreState.OPEN: State.OPEN,
    CoreState.CLOSING: State.CLOSING,
}

if TYPE_CHECKING:
    from collections.abc import Callable

    from websockets.client import ClientProtocol

    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class _QuietCore(_Adapter):
    """Logger that keeps the core from DEBUG, where it writes out request headers and with them the api key."""

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name is logging's
        return level >= logging.WARNING and super().isEnabledFor(level)


CORE_LOGGER = _QuietCore(logging.getLogger(__name__), {})
"""The logger to give to every core."""


class Engine:
    """Parser of received bytes into messages, which also queues what is to be sent.

    Bytes are put into ``inbox``; after `parse`, messages are in ``queue`` and bytes to send in ``pending``. The
    attributes are plain because the connection's inner loop uses them at every message.

    Args:
        core: The I/O-free core of the right side, not used yet (server) or with the request queued (client). Without
            a ``max_size``: it would count a ping between two fragments to their message.
        address: The peer, for log messages and errors.
        max_message_bytes: The largest payload accepted; a larger one ends the connection with close code 1009.
        answer: Server side: what to respond to a handshake request.
    """

    def __init__(
        self,
        core: ServerProtocol | ClientProtocol,
        address: str,
        max_message_bytes: int,
        answer: Callable[[Request], Response] | None = None,
    ) -> None:
        self.state = State.CONNECTING
        self.close_code: int | None = None
        self.close_reason = ""
        self.close_detail = ""
        self.inbox = Inbox()
        self.queue: deque[memoryview | str] = deque()
        self.stalled = False
        """Whether parsing, and so reading, stopped because enough messages are queued."""
        self.pending = bytearray()
        """Control frames and handshake bytes to send, never to be put in the middle of a frame."""
        self.end_pending = False
        """Whether the stream is to be ended once ``pending`` is sent."""
        self.over = ""
        """Why the socket is to be shut once ``pending`` is sent; empty while it is not."""
        self._core = core
        self._address = address
        self._server = isinstance(core, ServerProtocol)
        self._max_bytes = max_message_bytes
        self._answer = answer
        self._mask_bit = MASK_BIT if self._server else 0
        self._head_done = False
        self._deaf = False
        self._skip_bytes = 0
        self._fragments: bytearray | None = None
        self._fragments_text = False
        self._ping_count = 0
        self._small_frames = 0  # since the last whole message
        self._small_left = 0
        self._follow_core()

    @property
    def handshake_error(self) -> Exception | None:
        """What the core found wrong with the HTTP handshake, if anything."""
        return self._core.handshake_exc

    def parse(self, age_s: float) -> None:
        """Cut and queue whole binary frames of ``inbox``; hand everything else to the core, in order.

        Args:
            age_s: Seconds since the connection began: the longer it lasts, the more pings may have come.
        """
        self.stalled = False
        self._small_left = _SMALL_FRAMES_PER_PARSE
        while self._may_go_on() and self._take_frame():
            pass
        if self._small_frames > _SMALL_FRAMES + _SMALL_FRAMES_PER_S * age_s and self.state is State.OPEN:
            self._fail(1008, f"{self._small_frames} control frames and crumbs came without a message")

    def _may_go_on(self) -> bool:
        """Return whether there may be a frame to take, having dealt with what is none."""
        if self.state is State.OPEN:
            self.stalled = len(self.queue) >= _QUEUED_MESSAGES or self._small_left <= 0
            return not self.stalled
        while self.state is State.CONNECTING:
            if self.over or not self._parse_handshake():
                return False
        if self._deaf or self.state is State.CLOSED:
            self.inbox.discard()
            return False
        return True

    def _take_frame(self) -> bool:
        """Read the frame at the front of ``inbox``; False if it is not whole yet, or illegal."""
        inbox = self.inbox
        view, start = inbox.view, inbox.start
        have = inbox.end - start
        inbox.want = 0
        if self._skip_bytes:
            return self._skip(have)
        if have < 2:
            return False
        first, second = view[start], view[start + 1]
        short_lane = first == BINARY_FINAL and second & MASK_BIT == self._mask_bit and self._fragments is None
        fault = None if short_lane else check_header(first, second, masked=self._server)
        lengths = None if fault else parse_header(view, start, inbox.end)
        if lengths is None:
            if fault:
                self._fail(*fault)
            return False
        header, size = lengths
        if (size > self._max_bytes and not first & CONTROL_BIT) or (self._fragments and self._overflows(first, size)):
            self._fail(1009, f"message of {size} bytes or more exceeds the limit of {self._max_bytes} bytes")
            return False
        if short_lane and self.state is not State.OPEN:
            self._skip_bytes = header + size
            return True
        if have < header + size:
            inbox.want = header + size
            # Huge messages that nobody takes must not pile up; two of the largest size are still read.
            if size > _LARGE_FRAME_BYTES and self.queue and size + sum(map(len, self.queue)) > 2 * self._max_bytes:
                self.stalled = True
            return False
        body, inbox.start = start + header, start + header + size
        if short_lane:
            if self._server:
                mask_in_place(inbox.array, view, body, body + size, bytes(view[body - 4 : body]))
            self.queue.append(view[body : body + size])
            self._small_frames = 0
            inbox.lent = True
        else:
            if size < _CRUMB_BYTES:
                self._small_frames += 1
                self._small_left -= 1
            self._feed_core(bytes(view[start : body + size]))
        return True

    def _overflows(self, first: int, size: int) -> bool:
        """Return whether a continuation makes its message too large."""
        return not first & CONTROL_BIT and size + len(self._fragments or b"") > self._max_bytes

    def _skip(self, have: int) -> bool:
        """Drop a message that came after our own close frame, as far as it is here."""
        dropped = min(self._skip_bytes, have)
        self.inbox.start += dropped
        self._skip_bytes -= dropped
        return not self._skip_bytes

    def _parse_handshake(self) -> bool:
        """Feed the core the HTTP head and not a byte more, for frames may follow it at once; True to go on parsing."""
        inbox = self.inbox
        data = bytes(inbox.view[inbox.start : inbox.end])
        feed = len(data)
        if not self._head_done:
            end = data.find(_END_OF_HEAD)
            self._head_done = end >= 0
            # The end may be cut in two, so the last three bytes wait for the next.
            feed = end + len(_END_OF_HEAD) if end >= 0 else feed - 3
        if feed <= 0:
            return False
        inbox.start += feed
        self._feed_core(data[:feed])
        # A response that is no 101 has a body, which is the core's as well.
        return self.state is not State.CONNECTING or (self._head_done and inbox.start < inbox.end)

    def end_of_stream(self) -> str:
        """Record that the peer has ended the stream.

        Returns:
            What that means, for `close_detail`.
        """
        inbox = self.inbox
        have = inbox.end - inbox.start
        detail = "peer closed without a close frame"
        if self.state is State.CONNECTING:
            detail = "peer closed before the handshake was done"
            if not self.over and have:
                self._core.receive_data(bytes(inbox.view[inbox.start : inbox.end]))
        elif self.state is State.OPEN and (have or self._fragments is not None):
            detail += f" in the middle of a message ({have} of {inbox.want or 'unknown'} bytes of a frame came)"
        self._core.receive_eof()
        return detail

    def ping(self) -> None:
        """Queue a ping whose payload is its number."""
        self._ping_count += 1
        self._core.send_ping(str(self._ping_count).encode())
        self._follow_core()

    def close(self, code: int, reason: str) -> None:
        """Queue a close frame and go to CLOSING; code and reason must be legal and the state OPEN."""
        self._core.send_close(code, reason)
        self.stalled = False
        self.close_detail = self.close_detail or f"closed by this side with {code} {reason!r}"
        self._follow_core()

    def lose(self, detail: str) -> None:
        """Go to CLOSED, for the socket is gone; what was known about the end before stays."""
        self.state = State.CLOSED
        if self.close_code is None:
            self.close_code = 1006
            self.close_detail = self.close_detail or detail
        self.stalled = False
        self.pending.clear()

    def closed_error(self) -> ConnectionClosed:
        """Return the error for a call that needs an open connection."""
        detail = self.close_detail or ("the handshake is not done" if self.state is State.CONNECTING else "")
        code = 1006 if self.close_code is None else self.close_code
        return ConnectionClosed(self._address, code, self.close_reason, detail)

    def _feed_core(self, data: bytes) -> None:
        self._core.receive_data(data)
        for event in self._core.events_received():
            if isinstance(event, Frame):
                self._on_frame(event)
            elif isinstance(event, Request):
                self._on_request(event)
        self._follow_core()
        if len(self.pending) > _PENDING_BYTES:
            self.over = "peer asks for answers that it does not read"

    def _on_request(self, request: Request) -> None:
        if self._answer is None or not isinstance(self._core, ServerProtocol):
            return
        response = self._answer(request)
        if response.status_code != 101:
            body = bytes(response.body or b"").decode(errors="replace").partition("\n")[0]
            self.close_detail = f"handshake refused: {response.status_code} {response.reason_phrase}: {body}"
        self._core.send_response(response)

    def _on_frame(self, frame: Frame) -> None:
        """Put fragments, and whole text messages, together; the core has answered control frames already."""
        if frame.opcode is Opcode.TEXT or frame.opcode is Opcode.BINARY:
            self._fragments = bytearray(frame.data)
            self._fragments_text = frame.opcode is Opcode.TEXT
        elif frame.opcode is Opcode.CONT and self._fragments is not None:
            self._fragments += frame.data
        else:
            return
        if not frame.fin:
            return
        whole, self._fragments = self._fragments, None
        if self.state is not State.OPEN:
            return
        self._small_frames = 0
        if not self._fragments_text:
            self.queue.append(memoryview(whole))
            return
        try:
            self.queue.append(whole.decode())
        except UnicodeDecodeError as exc:
            self._fail(1007, f"text is not UTF-8: {exc.reason} at position {exc.start}")

    def _fail(self, code: int, text: str) -> None:
        """Fail the connection for a fault of the peer (RFC 6455, section 7.1.7)."""
        self._note_fault(text)
        self.inbox.discard()
        self._core.fail(code, text[:_REASON_BYTES])
        self._follow_core()

    def _note_fault(self, text: str) -> None:
        logger.warning("%s broke the WebSocket protocol: %s", self._address, text)
        self.close_detail = text
        self._deaf = True

    def _follow_core(self) -> None:
        """Adopt what the core wants sent, and its state."""
        core = self._core
        for data in core.data_to_send():
            if data:
                self.pending += data
            else:
                self.end_pending = True
        if core.parser_exc is not None and not self._deaf:
            self._note_fault(str(core.parser_exc))
        if core.close_rcvd is not None:
            self._deaf = True
            if self.close_code is None:
                self.close_code, self.close_reason = int(core.close_rcvd.code), core.close_rcvd.reason
        self.state = _STATES.get(core.state, self.state)
        if core.state is CoreState.CONNECTING and core.close_expected() and not self.over:
            exc: Any = core.handshake_exc
            cause = f" ({exc.__cause__})" if exc is not None and exc.__cause__ is not None else ""
            self.over = self.close_detail or f"handshake failed: {exc}{cause}"
