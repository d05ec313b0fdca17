"""A federation over Flower: keys, Flower's processes as children, and bridges that forward bytes.

Training runs in this process, and a site's data stays in the site's process; Flower's own processes only see bytes.
Nothing here imports torch, numpy or lightning, because Flower starts a process per message. Needs the extra ``deploy``.
"""
