"""Reading files: one blocking reader for each way to read, and one asynchronous reader over them.

``readers.py`` reads into memory that is given and returns when it is filled: past the page cache, through it, or from a
map. ``async_reader.py`` keeps many such reads under way in threads, the most urgent first. ``checksums.py`` compares
every page that is read with the checksum that was written beside it. ``probing.py`` measures which reader is the
fastest on a file.
"""
