"""What the connector costs: `python -m worker_connector.bench`, or `dynamo_semkv bench connector`."""
