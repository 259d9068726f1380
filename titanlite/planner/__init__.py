"""What a config costs and how it is placed on any mesh, found out without its processes and without a GPU.

May import train and what lies below it. Never starts a process or trains.
"""
