-- Say what a set of prompts is; what the first producer says stands.
-- KEYS  void, prompts
-- ARGV  name, description
-- Returns  the description that the run has
redis.call('HSETNX', keys.prompts, ARGV[1], ARGV[2])
return redis.call('HGET', keys.prompts, ARGV[1])
