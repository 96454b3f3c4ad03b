"""The runners, which run the stages of a build in this process or on the members of a gang."""
