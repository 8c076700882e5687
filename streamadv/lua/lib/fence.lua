-- fenced(hash, epoch): true if a newer trainer has taken over. `hash` is the run's lineage or a shard's copy.
local function fenced(hash, epoch)
  local current = tonumber(redis.call('HGET', hash, 'epoch') or '') or 0
  return tonumber(epoch) < current
end
