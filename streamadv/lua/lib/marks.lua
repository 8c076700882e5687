-- The batches named in a shard are marked in the hash `applied`: batch id -> 'entry id, trajectories' of each of its groups
-- there. Of the groups log what any mark names is in flight, the rest is grouped. Usually the trainer knows every mark,
-- and a group has one at most; after a failover a shard may have older ones that are yet to be taken back.

-- The marks of all batches as one text.
local function marks_of(applied)
  local flat, texts = redis.call('HGETALL', applied), {' '}
  for i = 1, #flat, 2 do
    if not string.find(flat[i], ':', 1, true) then texts[#texts + 1] = flat[i + 1] end  -- else dead: or left_out:
  end
  return table.concat(texts, ' ') .. ' '
end

local function is_marked(marks, entry)
  return string.find(marks, ' ' .. entry .. ' ', 1, true) ~= nil
end
