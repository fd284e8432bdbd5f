"""Offload from inside other people's trainers, and under the names that other libraries have for it.

Each module is for one of them and is imported by itself: `import neaptide` needs none of those libraries.
"""
