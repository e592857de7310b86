"""The Spark source: most of it without a JVM, the rest on one that the tests share."""
