"""Drop-ins: the losses under the names and signatures of other libraries, so that you change one import.

Each module is for one library and is imported by name, for example `megabatch.integrations.open_clip`. The extra of the
same name installs the library.
"""
