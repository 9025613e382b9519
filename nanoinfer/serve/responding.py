"""From a `RequestStream` to the client: wait for the end, or stream; notice when the client disconnects."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from nanoinfer.outputs import RequestOutput
from nanoinfer.serve.answers import DONE, Answer
from nanoinfer.serve.errors import ApiError
from nanoinfer.serve.receiving import while_client_stays
from nanoinfer.serve.request_stream import RequestStream, StreamClosedError


def error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")


async def whole_answer(stream: RequestStream, answer: Answer, receive: Receive) -> Response:
    """Wait for the last token and return the whole answer.

    Raises:
        ApiError: as for `RequestStream.next`.
        StreamClosedError: the client has disconnected.
    """

    async def body() -> bytes:
        outputs: list[RequestOutput | None] = [None] * len(stream.prompts)
        while items := await stream.next():
            for place, output in items:
                outputs[place] = output
        return answer.whole(outputs)

    try:
        return Response(await while_client_stays(receive, body()), media_type="application/json")
    finally:
        stream.close()


class EventStream(Response):
    """Server-sent events: each output is sent as soon as it is known. Outputs that came together share one write."""

    def __init__(self, stream: RequestStream, answer: Answer) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._stream, self._answer = stream, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_client_stays(receive, self._send_all(send))
        except StreamClosedError:
            pass  # nobody reads any more
        finally:
            self._stream.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            if first := self._answer.first_events():
                await send(_part(first))
            while items := await self._stream.next():
                if events := self._answer.events(items):
                    await send(_part(events))
            await send(_part(self._answer.last_events()))
        except ApiError as error:
            await send(_part(b"data: " + error.body() + b"\n\n" + DONE))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _part(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}
