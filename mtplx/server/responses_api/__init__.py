"""OpenAI's ``/v1/responses``: bodies, items, events, and the store of responses."""
