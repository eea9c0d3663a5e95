"""The configuration as a JSON schema, for editors: made from the same declarations that check a file."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_semkv.config.schema import Config

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12. It cannot say what two fields must be together: `check-config` has the last word."""
    schema = msgspec.json.schema(Config)
    return {"$schema": DRAFT, "title": "dynamo_semkv configuration", **schema}
