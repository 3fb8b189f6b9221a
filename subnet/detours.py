"""Messages of the detour: a frame that cannot be pushed goes through the blob store (DESIGN D84).

The sender asks for an upload, stores the payload, and announces the frame's header with its signature; the orchestrator keeps
the announcement until the receiver has said what became of it, and tells the sender. None of it is journaled: frames are no
part of the record, receipts are.
"""

from typing import Annotated

from msgspec import Meta

from subnet.receipts import canonical
from subnet.types import FrameHeader, Hotkey, Message, Record

Name = Annotated[str, Meta(max_length=200)]
"""`frame_name` of an announced frame."""
KIND = "frame"
"""Of the objects that hold payloads."""
MAX_WAITING = 64
"""Frames that one receiver works on at a time, at most; the others wait with the orchestrator."""


class DetourRequest(Message, frozen=True):
    """Base of requests about frames that could not be pushed."""


class RequestFrameUpload(DetourRequest, frozen=True):
    """Where to put the payload of a frame that its receiver could not be given. Answer: UploadGrant.

    Key, size and receiver follow from the header, whose lease must be the sample's newest.
    """

    header: FrameHeader


class AnnounceFrame(DetourRequest, frozen=True):
    """The payload lies in the store; `signature` is the sender's over `frame_bytes`. Answer, once it is taken: Done.

    A repeat of it is harmless. While the receiver has not taken the frame the answer is that it is busy: ask again.
    """

    header: FrameHeader
    signature: Annotated[str, Meta(max_length=256)]


class CollectFrames(DetourRequest, frozen=True):
    """Wait for frames that lie in the store for the caller, other than those `known` to it already. Answer: WaitingFrames."""

    known: Annotated[tuple[Name, ...], Meta(max_length=MAX_WAITING)] = ()


class SettleFrame(DetourRequest, frozen=True):
    """What became of a frame that was collected: taken, when `refusal` is empty. Answer: Done."""

    name: Name
    refusal: Annotated[str, Meta(max_length=400)] = ""


AnyDetourRequest = RequestFrameUpload | AnnounceFrame | CollectFrames | SettleFrame


class WaitingFrame(Record, frozen=True):
    """An announced frame; `url` gives its payload."""

    sender: Hotkey
    header: FrameHeader
    signature: str
    url: str

    @property
    def name(self) -> str:
        """Names it to the orchestrator."""
        return frame_name(self.sender, self.header)


class WaitingFrames(Message, frozen=True):
    """What waits, oldest first; empty when nothing came for a while."""

    frames: tuple[WaitingFrame, ...]


def frame_name(sender: Hotkey, header: FrameHeader) -> str:
    """One name for each pass of one sender."""
    return f"{sender}/{header.pass_id}"


def frame_bytes(header: FrameHeader, *, receiver: Hotkey) -> bytes:
    """What the sender of an announced frame signs; the header names run and payload."""
    return b"strata/frame/1\n" + canonical([receiver, header])
