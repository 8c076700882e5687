-- Read the run's manifest after writing the values nobody has given yet: the first one given stands.
-- KEYS  void, manifest
-- ARGV  field, value, ...
-- Returns  {1 if there was none before, the manifest as field, value, ...}
redis.call('DEL', KEYS[1])
local is_new = 0
for i = 1, #ARGV, 2 do
  local written = redis.call('HSETNX', KEYS[2], ARGV[i], ARGV[i + 1])
  if ARGV[i] == 'schema_version' then is_new = written end
end
local reply = redis.call('HGETALL', KEYS[2])
table.insert(reply, 1, is_new)
return reply
