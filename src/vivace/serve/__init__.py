"""The server: OpenAI's HTTP interface over one ``Session``, and a page where people see what happened.

A request goes through these files: ``middleware.py`` (key, size), ``app.py`` (route), ``bodies.py`` (fields),
``parsing.py`` (fields to decode requests), ``call.py`` and ``worker.py`` (the thread that steps the session),
``answering.py`` and ``replies.py`` (events to JSON).
"""
