"""Call one Dynamo endpoint with a JSON request and print the chunks as JSON lines: `call.py ENDPOINT REQUEST`. Run as a
module."""

from __future__ import annotations

import json
import sys

import uvloop
from dynamo.runtime import DistributedRuntime, dynamo_worker


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    client = await runtime.endpoint(sys.argv[1]).client()
    await client.wait_for_instances()
    async for chunk in await client.generate(json.loads(sys.argv[2]), annotated=False):
        print(json.dumps(chunk), flush=True)
    runtime.shutdown()


if __name__ == "__main__":
    uvloop.run(main())
