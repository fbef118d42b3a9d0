"""Requests to any OpenAI-compatible chat server: for a policy behind one (rollout), and for judges (rewards).

Neutral ground: nothing here knows of episodes, environments or rewards.
"""
