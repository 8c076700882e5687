-- Write the settings that the run's manifest does not have yet, so that the first value given stands; then read it.
-- KEYS  manifest_void, manifest
-- ARGV  field, value, ...
-- Returns  {1 if there was none before, the manifest as field, value, ...}
local is_new = 0
for i = 1, #ARGV, 2 do
  local written = redis.call('HSETNX', keys.manifest, ARGV[i], ARGV[i + 1])
  if ARGV[i] == 'schema_version' then is_new = written end
end
local reply = redis.call('HGETALL', keys.manifest)
table.insert(reply, 1, is_new)
return reply
