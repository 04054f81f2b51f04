"""The losses under the names, signatures and habits of other tools: one changed import in a script that exists.

Each module stands for one tool and is imported by name, for example `megabatch.integrations.open_clip`; what it needs
of that tool comes with the extra of the same name.
"""
