-- The trainer goes on from this version: what evaluation has shown of later ones is of weights that were taken back. Nor
-- do groups count for them that were begun under an older epoch.
-- KEYS  void, trainer, evals
-- fenced by trainer
-- ARGV  epoch, version
-- Returns  number of results removed
local removed = 0
for _, field in ipairs(redis.call('HKEYS', keys.evals)) do
  local version = tonumber(string.match(field, '^(%d+) ') or '')
  if version and version > tonumber(ARGV[2]) then removed = removed + redis.call('HDEL', keys.evals, field) end
end
redis.call('HSET', keys.evals, 'restored', ARGV[2] .. ' ' .. ARGV[1])
if (tonumber(redis.call('HGET', keys.evals, 'floor') or '') or -1) > tonumber(ARGV[2]) then
  redis.call('HSET', keys.evals, 'floor', ARGV[2])
end
return removed
