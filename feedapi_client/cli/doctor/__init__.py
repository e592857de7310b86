"""``feedapi doctor``: is this a sound FeedAPI publisher?"""
