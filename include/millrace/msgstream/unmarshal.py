"""Dispatchers of chapter 4, which unmarshal messages by type, and their factories.

ProtoUDFactory's take bytes (the wire form). MemUDFactory's take message objects, for channels in one process, and
return the same object without a copy.
"""

from __future__ import annotations

from typing import Any

from millrace.base.errors import InvalidArgument, Malformed, UnsupportedMessageType
from millrace.msgstream.messages import CLASSES, BaseMsg, GenericMsg
from millrace.msgstream.protocol import MsgType, TsMsg, UnmarshalDispatcher, UnmarshalFunc


class TemplateDispatcher:
    """A dispatcher with one function per type (the UnmarshalDispatcher protocol)."""

    def __init__(self, templates: dict[MsgType, UnmarshalFunc]) -> None:
        self._templates = dict(templates)

    def unmarshal(self, input: Any, msg_type: MsgType) -> TsMsg:
        """See UnmarshalDispatcher.

        Raises the errors of the type's template.
        """
        template = self._templates.get(msg_type)
        if template is None:
            raise UnsupportedMessageType(f"no template for messages of type {msg_type!r}: add one")
        return template(input)

    def add_msg_template(self, msg_type: MsgType, unmarshal_func: UnmarshalFunc) -> None:
        """See UnmarshalDispatcher."""
        self._templates[msg_type] = unmarshal_func


class ProtoUDFactory:
    """Dispatchers of the wire form, with a template for every type: its class, or GenericMsg."""

    def new_unmarshal_dispatcher(self) -> UnmarshalDispatcher:
        """Return a new dispatcher."""
        return TemplateDispatcher({each: CLASSES.get(each, GenericMsg).unmarshal for each in MsgType})


class MemUDFactory:
    """Dispatchers of message objects, with a template for every type that returns the object."""

    def new_unmarshal_dispatcher(self) -> UnmarshalDispatcher:
        """Return a new dispatcher."""
        return TemplateDispatcher({each: _same(each) for each in MsgType})


def _same(msg_type: MsgType) -> UnmarshalFunc:
    def check(input: Any) -> TsMsg:
        if not isinstance(input, BaseMsg):
            raise InvalidArgument(f"an in-memory message must be a message object, not {type(input).__name__}")
        if input.type != msg_type:
            raise Malformed(f"the message is of type {input.type.name}, not {msg_type.name}")
        return input

    return check
