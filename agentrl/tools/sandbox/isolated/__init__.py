"""What runs outside the caller's process: standard library only, imported without site-packages.

The supervisor starts with this folder's parent on its path, so these modules import only one another.
"""
