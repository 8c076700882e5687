-- Read the run's manifest after writing the values nobody has given yet: the first one given stands.
-- KEYS  void, manifest
-- ARGV  field, value, ...
-- Returns  the manifest as field, value, ...
redis.call('DEL', KEYS[1])
for i = 1, #ARGV, 2 do redis.call('HSETNX', KEYS[2], ARGV[i], ARGV[i + 1]) end
return redis.call('HGETALL', KEYS[2])
