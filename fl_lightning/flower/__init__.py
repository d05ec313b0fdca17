"""A federation over Flower: keys, the processes of Flower as children, and bridges that only pass bytes on.

The training runs in this process and the data of a site in that of the site; Flower's own processes see bytes. Nothing
here imports torch, numpy or lightning, because Flower starts a process for every message. Needs the extra ``deploy``.
"""
